"""What libraries make of their users' calls: LangChain, LiteLLM, Vercel's ai, frameworks of agents, old OpenAI SDKs."""

from __future__ import annotations

from typing import Any

from tests.integration.agents.shapes import (
    ASK,
    BASH,
    LIST,
    LISTING,
    PLACE,
    TOOLS,
    USAGE,
    Recorded,
    called,
    chat,
    flat,
    function,
    parameters,
    responses,
)
from tests.support.harness import MODEL

_ASKED = {"role": "user", "content": ASK}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": LISTING}
_CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [called()]}
_ANSWER = function("final_result", "The answer.", parameters(["ok"], ok={"type": "boolean"}))
_FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "Answer",
        "strict": True,
        "schema": {"title": "Answer", **parameters(["ok"], ok={"title": "Ok", "type": "boolean"})},
    },
}
_CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command":"ls"}'}
_OUTPUT_ITEM = {"type": "function_call_output", "call_id": "call_1", "output": LISTING}
_OLD_FUNCTION = {"name": "list", "description": "List a folder.", "parameters": parameters(["path"], path=PLACE)}

RECORDED = [
    chat("langchain", "a question", messages=[{"content": ASK, "role": "user"}], stream=False),
    chat(
        "langchain",
        "structured output by its form",
        messages=[_ASKED],
        response_format=_FORM,
        stream=False,
        answer="json",
    ),
    chat(
        "langchain",
        "structured output by a function",
        messages=[_ASKED],
        tools=[_ANSWER],
        tool_choice={"type": "function", "function": {"name": "final_result"}},
        parallel_tool_calls=False,
        stream=False,
        answer="function_call",
    ),
    chat(
        "langchain",
        "parts with ids of their own",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": ASK, "id": "lc_1"}], "name": "user_1"},
            {**_CALLED, "content": [{"type": "text", "text": "I look.", "index": 0}]},
            _RESULT,
        ],
        tools=[BASH],
        stream_options={"include_usage": True},
        stream=True,
        stop=["\nObservation:"],
        n=1,
        logprobs=None,
    ),
    responses(
        "langchain",
        "a tool has answered",
        input=[{"content": ASK, "role": "user", "type": "message"}, _CALL_ITEM, _OUTPUT_ITEM],
        tools=[flat(BASH)],
        reasoning={"effort": "low", "summary": "auto"},
        stream=True,
    ),
    chat("litellm", "effort of thinking", messages=[_ASKED], reasoning_effort="low"),
    chat(
        "litellm",
        "Anthropic's messages as chat",
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": ASK}]},
            {
                "role": "assistant",
                "tool_calls": [called()],
                "reasoning_content": "Look.",
                "thinking_blocks": [{"type": "thinking", "thinking": "Look.", "signature": "EqQB"}],
                "provider_specific_fields": None,
            },
            _RESULT,
        ],
        tools=TOOLS,
        max_tokens=32_000,
        reasoning_effort="low",
        user="u",
        **USAGE,
    ),
    chat(
        "vercel ai",
        "chat by its own provider",
        messages=[{"role": "system", "content": "Be brief."}, _ASKED, {**_CALLED, "content": ""}, _RESULT],
        tools=[BASH],
        tool_choice="auto",
        max_tokens=4096,
        **USAGE,
    ),
    responses(
        "vercel ai",
        "responses by its own provider",
        input=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "id": "msg_1"},
            _CALL_ITEM,
            _OUTPUT_ITEM,
        ],
        tools=[flat(BASH, strict=False)],
        tool_choice="auto",
        stream=True,
        include=["reasoning.encrypted_content"],
        store=False,
    ),
    responses(
        "openai agents",
        "an agent with hosted tools and a hand-over",
        instructions="Be brief.",
        input=[{"content": ASK, "role": "user"}],
        tools=[
            flat(function("transfer_to_writer", "Hand over.", parameters([])), strict=True),
            {"type": "file_search", "vector_store_ids": ["vs_1"]},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "image_generation", "output_format": "png"},
            {"type": "mcp", "server_label": "a", "server_url": "https://a.example", "require_approval": "never"},
            {"type": "web_search_preview", "user_location": None, "search_context_size": "medium"},
            {"type": "computer_use_preview", "display_width": 1024, "display_height": 768, "environment": "browser"},
        ],
        include=[],
        parallel_tool_calls=False,
        truncation="auto",
        metadata=None,
        stream=False,
        left_out="tools left out: file_search, code_interpreter, image_generation, mcp, web_search_preview, "
        "computer_use_preview",
    ),
    responses(
        "openai sdk",
        "free text of a day is demanded",
        input=ASK,
        tools=[
            {
                "type": "custom",
                "name": "day",
                "description": "A day.",
                "format": {"type": "grammar", "syntax": "regex", "definition": "20[0-9]{2}-0[1-9]"},
            }
        ],
        tool_choice={"type": "custom", "name": "day"},
        stream=True,
        answer="custom_tool_call",
    ),
    responses(
        "openai sdk",
        "patches and a shell",
        input=[
            {"role": "user", "content": ASK},
            {
                "type": "apply_patch_call",
                "id": "apc_1",
                "call_id": "call_1",
                "status": "completed",
                "operation": {"type": "create_file", "path": "a", "diff": "+hi\n"},
            },
            {"type": "apply_patch_call_output", "call_id": "call_1", "status": "completed", "output": "Created a"},
        ],
        tools=[{"type": "apply_patch"}, {"type": "local_shell"}],
        stream=True,
    ),
    chat(
        "pydantic ai",
        "an answer is a call",
        messages=[{"role": "system", "content": "Be brief."}, _ASKED],
        tools=[_ANSWER],
        tool_choice="required",
        stream=False,
        answer="function_call",
    ),
    chat(
        "instructor",
        "JSON of a schema in words",
        messages=[{"role": "system", "content": 'Answer with JSON: {"ok": bool}'}, _ASKED],
        response_format={"type": "json_object", "schema": parameters(["ok"], ok={"type": "boolean"})},
        answer="json",
    ),
    chat(
        "smolagents",
        "calls in words, with many ends",
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": ASK}]},
        ],
        tools=[LIST],
        tool_choice="required",
        stop=["Observation:", "Calling tools:", "<end_code>"],
        answer="function_call",
    ),
    chat(
        "autogen",
        "speakers have names",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "name": "writer", "content": ASK},
            {"role": "assistant", "name": "critic", "content": "None."},
            _ASKED,
        ],
        stream=False,
    ),
    chat(
        "semantic kernel",
        "what is off is sent, too",
        messages=[_ASKED],
        modalities=["text"],
        audio=None,
        store=False,
        service_tier="auto",
        logit_bias={},
        stop=None,
        seed=None,
        web_search_options=None,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        top_logprobs=None,
        functions=None,
        function_call=None,
        prediction=None,
    ),
    chat(
        "old openai sdk",
        "functions left to the model",
        messages=[
            _ASKED,
            {"role": "assistant", "content": None, "function_call": {"name": "list", "arguments": '{"path":"."}'}},
            {"role": "function", "name": "list", "content": LISTING},
        ],
        functions=[_OLD_FUNCTION],
        function_call="auto",
    ),
    chat(
        "old openai sdk",
        "a function by its name",
        messages=[_ASKED],
        functions=[_OLD_FUNCTION],
        function_call={"name": "list"},
        answer="function_call",
    ),
    Recorded(
        client="langchain",
        shape="vectors of token ids",
        path="/v1/embeddings",
        body={"model": MODEL, "input": [[504, 3575], [282]], "encoding_format": "base64"},
        answer="vectors",
    ),
]
