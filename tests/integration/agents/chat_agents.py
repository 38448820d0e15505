"""Coding agents that speak chat completions, nearly all of them streamed and with functions."""

from __future__ import annotations

from typing import Any

from tests.integration.agents.shapes import (
    ASK,
    BASH,
    EDIT,
    LIST,
    LISTING,
    PLACE,
    READ,
    TODO_LIST,
    TOOLS,
    USAGE,
    called,
    chat,
    completion,
    function,
    parameters,
)

_SYSTEM = {"role": "system", "content": "You are an agent in a terminal. Be brief."}
_ASKED = {"role": "user", "content": ASK}
_PARTS = {"role": "user", "content": [{"type": "text", "text": ASK}]}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": LISTING}
_CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [called()]}
_EMPTY_CALLED = _CALLED | {"content": ""}


def _strict(tool: dict[str, Any], strict: bool) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": strict}}


def _dialogue(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [_SYSTEM, _ASKED, *more]


_DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}

RECORDED = [
    chat(
        "opencode",
        "a title for the session",
        messages=[
            {"role": "system", "content": "You write titles, and nothing else."},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            {"role": "user", "content": f'"{ASK}"'},
        ],
        max_tokens=32_000,
        **USAGE,
    ),
    chat("opencode", "first turn", messages=_dialogue(), tools=TOOLS, tool_choice="auto", max_tokens=32_000, **USAGE),
    chat(
        "opencode",
        "a command has run",
        messages=_dialogue(_EMPTY_CALLED, _RESULT),
        tools=TOOLS,
        tool_choice="auto",
        max_tokens=32_000,
        **USAGE,
    ),
    chat("cline", "first turn", messages=_dialogue(), tools=TOOLS, tool_choice="auto", **USAGE),
    chat(
        "cline",
        "tools in words, as before it knew functions",
        messages=_dialogue(
            {"role": "assistant", "content": "<list><path>.</path></list>"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "[list] Result:"}, {"type": "text", "text": LISTING}],
            },
        ),
        temperature=0,
        **USAGE,
    ),
    chat(
        "roo code",
        "strict functions",
        messages=[{"role": "system", "content": "Be brief."}, _PARTS, _EMPTY_CALLED, _RESULT],
        tools=[_strict(tool, True) for tool in (BASH, LIST, TODO_LIST)],
        tool_choice="auto",
        parallel_tool_calls=False,
        max_completion_tokens=8192,
        reasoning_effort="medium",
        **USAGE,
    ),
    chat("continue", "first turn", messages=_dialogue(), tools=TOOLS, **USAGE),
    chat(
        "continue",
        "in an editor",
        messages=_dialogue(_EMPTY_CALLED, _RESULT, {"role": "assistant", "content": "Two."}, _ASKED),
        tools=[READ, EDIT],
        max_tokens=4096,
        temperature=0.5,
        prediction=None,
        stream=True,
    ),
    completion(
        "continue",
        "completes what is typed",
        prompt="<fim_prefix>def add(a, b):\n    <fim_suffix>\n<fim_middle>",
        max_tokens=4096,
        temperature=0.01,
        stop=[
            *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>"),
            *("</code>", "/src/", "#- coding: utf-8", "```", "\n\n\n"),
        ],
        stream=True,
    ),
    chat(
        "qwen code",
        "first turn",
        messages=[
            _SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": "These are the surroundings."}]},
            {"role": "assistant", "content": "Understood."},
            _PARTS,
        ],
        tools=TOOLS,
        max_tokens=8000,
        **USAGE,
    ),
    chat(
        "qwen code",
        "a command has run",
        messages=[_SYSTEM, _PARTS, _CALLED, {**_RESULT, "content": [{"type": "text", "text": LISTING}]}],
        tools=[function("bash", "Run.", {**_DRAFT_7, **parameters(["command"], command={"type": "string"})})],
        max_tokens=8000,
        extra_body={"enable_thinking": False},
        without_effect="extra_body",
        metadata={"sessionId": "a", "promptId": "b"},
        **USAGE,
    ),
    chat(
        "pi",
        "first turn",
        messages=[{"role": "developer", "content": "Be brief."}, _PARTS],
        tools=[_strict(tool, False) for tool in (READ, BASH, EDIT)],
        store=False,
        max_completion_tokens=32_000,
        reasoning_effort="medium",
        **USAGE,
    ),
    chat(
        "aider",
        "an edit in blocks",
        messages=[
            {"role": "system", "content": "Answer with blocks of search and replacement."},
            {"role": "user", "content": "Change a to b."},
            {"role": "assistant", "content": "Ok."},
            _ASKED,
            {"role": "system", "content": "Only blocks."},
        ],
        temperature=0,
        stream=True,
    ),
    chat("aider", "a message for the commit", messages=_dialogue(), temperature=0, stream=False),
    chat(
        "aider",
        "an edit as a function, in its oldest form",
        messages=_dialogue(),
        functions=[{"name": "list", "description": "List.", "parameters": parameters(["path"], path=PLACE)}],
        function_call={"name": "list"},
        temperature=0,
        stream=True,
        answer="function_call",
    ),
    chat(
        "zed",
        "an agent's turn",
        messages=[{"role": "system", "content": "Be brief."}, _PARTS, _CALLED, _RESULT],
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=False,
        stop=[],
        temperature=1.0,
        prompt_cache_key="thread",
        max_completion_tokens=65_536,
        **USAGE,
    ),
    chat("zed", "a summary of the thread", messages=_dialogue(), stop=[], tools=[], **USAGE),
    chat(
        "goose",
        "a tool has answered",
        messages=_dialogue(_CALLED, _RESULT),
        tools=TOOLS,
        temperature=0.7,
        max_completion_tokens=16_384,
        **USAGE,
    ),
    chat(
        "crush",
        "a tool has answered",
        messages=_dialogue({**_CALLED, "content": "I look."}, _RESULT),
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tokens=50_000,
        reasoning_effort="high",
        user="session",
        **USAGE,
    ),
    chat(
        "openhands",
        "cached parts",
        messages=[
            {
                "role": "system",
                "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            },
            _PARTS,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [called()]},
            {**_RESULT, "name": "bash", "content": [{"type": "text", "text": LISTING}]},
        ],
        tools=TOOLS,
        temperature=0.0,
        top_p=1.0,
        max_completion_tokens=4096,
        seed=None,
        metadata={"session_id": "a", "tags": ["b"]},
    ),
    chat(
        "copilot",
        "a model of the user's own",
        messages=_dialogue(),
        tools=[BASH, TODO_LIST],
        tool_choice="auto",
        temperature=0.1,
        top_p=1,
        n=1,
        max_tokens=4096,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=False,
        snippy={"enabled": False},
        without_effect="snippy",
    ),
    chat(
        "mistral vibe",
        "a tool has answered",
        messages=_dialogue({**_CALLED, "reasoning_content": "Look."}, {**_RESULT, "name": "bash"}),
        tools=[_strict(tool, False) for tool in (BASH, READ)],
        tool_choice="auto",
        temperature=0.2,
        max_tokens=None,
        **USAGE,
    ),
    chat(
        "openai sdk",
        "free text and functions, of which one is demanded",
        messages=_dialogue(),
        tools=[{"type": "custom", "custom": {"name": "note", "description": "Write it down."}}, LIST],
        tool_choice="required",
        max_completion_tokens=60,
        stream=False,
        answer="function_call",
    ),
    chat(
        "openai sdk",
        "free text after a grammar is demanded",
        messages=_dialogue(),
        tools=[
            {
                "type": "custom",
                "custom": {
                    "name": "day",
                    "description": "A day.",
                    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "20[0-9]{2}-0[1-9]"}},
                },
            }
        ],
        tool_choice={"type": "custom", "custom": {"name": "day"}},
        stream=True,
        answer="custom_tool_call",
    ),
    chat(
        "openai sdk",
        "a free text was called",
        messages=_dialogue(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "custom", "custom": {"name": "note", "input": "hi"}}],
            },
            _RESULT,
        ),
        tools=[{"type": "custom", "custom": {"name": "note"}}],
        **USAGE,
    ),
    chat(
        "openai sdk",
        "some of the tools",
        messages=_dialogue(),
        tools=[BASH, LIST],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "list"}}]},
        },
        stream=True,
        answer="function_call",
    ),
    chat(
        "openai sdk",
        "a search beside the answer",
        messages=_dialogue(),
        web_search_options={"search_context_size": "low"},
        left_out="tools left out: web_search",
    ),
    chat(
        "mistral client",
        "arguments as an object, a silent tool, and an image from another",
        messages=_dialogue(
            {"role": "assistant", "tool_calls": [called(arguments={"command": "ls"}), called(call_id="call_2")]},
            {"role": "tool", "tool_call_id": "call_1", "content": None},
            {
                "role": "tool",
                "tool_call_id": "call_2",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}],
            },
        ),
        tools=[LIST],
        tool_choice="any",
        answer="function_call",
        left_out="items left out: image_url",
    ),
    chat(
        "vllm client",
        "several tokens in a chunk",
        messages=_dialogue(),
        stream_interval=4,
        mm_processor_kwargs={},
        **USAGE,
        without_effect="stream_interval",
    ),
]
