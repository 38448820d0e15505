"""Claude Code and others on Anthropic's SDK: Messages with cached blocks, thinking, and limits of a model table."""

from __future__ import annotations

from typing import Any

from tests.integration.agents.shapes import (
    ASK,
    BASH,
    EDIT,
    LISTING,
    READ,
    TODO_LIST,
    TOOLS,
    Recorded,
    anthropic,
    messages,
    parameters,
)

_CACHED = {"cache_control": {"type": "ephemeral"}}
_HEADERS = {
    "x-app": "cli",
    "x-claude-code-session-id": "a6b4839c-efeb-4982-a1eb-83bdacb83ae9",
    "authorization": "Bearer none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
}
_DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_TOOLS = [
    *(anthropic(tool) | {"input_schema": {**_DRAFT, **tool["function"]["parameters"]}} for tool in TOOLS),
    {
        "name": "agent",
        "description": "Let another agent do it.",
        "input_schema": {
            **_DRAFT,
            **parameters(
                ["prompt"],
                prompt={"type": "string"},
                model={"type": "string", "enum": ["small", "large"]},
                answers={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
            ),
        },
    },
    {"name": "later", "description": "More tools.", "input_schema": {"type": "object"}, "defer_loading": True},
]
_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.aad; cc_entrypoint=cli;"},
    {"type": "text", "text": "You are an agent in a terminal.", **_CACHED},
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
]
_ASKED: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>\nNothing to remember.\n</system-reminder>"},
        {"type": "text", "text": ASK},
    ],
}
_SURROUNDINGS = {"role": "system", "content": "# Environment\nlinux", "output_config": {"effort": "medium"}}
_FIELDS: dict[str, Any] = {
    "system": _SYSTEM,
    "metadata": {"user_id": '{"device_id":"071a4e","account_uuid":"","session_id":"a6b4839c"}'},
    "max_tokens": 128_000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
_USED = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls", "timeout": 1000}}


def _result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"tool_use_id": "toolu_1", "type": "tool_result", "content": content, **more}]}


def _claude_code(shape: str, history: list[dict[str, Any]], **fields: Any) -> Recorded:
    fields.setdefault("without_effect", "" if fields.get("answer") == "error" else "context_management")
    return messages("claude code", shape, messages=history, headers=_HEADERS, **_FIELDS | fields)


RECORDED = [
    _claude_code(
        "first turn",
        [
            _ASKED,
            {**_SURROUNDINGS, "content": [{"type": "text", "text": "# Environment\nlinux", **_CACHED}]},
        ],
        tools=_TOOLS,
    ),
    _claude_code(
        "a command has run",
        [_ASKED, _SURROUNDINGS, {"role": "assistant", "content": [_USED]}, _result(LISTING, is_error=False, **_CACHED)],
        tools=_TOOLS,
    ),
    _claude_code(
        "thoughts between calls, as its second version began",
        [
            _ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look.", "signature": "EqQB"},
                    {"type": "redacted_thinking", "data": "EmwK"},
                    {"type": "text", "text": "I look."},
                    _USED,
                ],
            },
            _result([{"type": "text", "text": LISTING}, {"type": "text", "text": "(end)"}]),
        ],
        tools=_TOOLS,
        thinking={"type": "enabled", "budget_tokens": 31_999},
        max_tokens=32_000,
        output_config=None,
    ),
    _claude_code(
        "an image and a paper were read",
        [
            _ASKED,
            {"role": "assistant", "content": [_USED]},
            _result(
                [
                    {"type": "text", "text": LISTING},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}},
                ]
            ),
            {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
            {"role": "user", "content": "And now?"},
        ],
        tools=_TOOLS,
        left_out="items left out: image, document",
    ),
    _claude_code(
        "a command has failed, and the user has more to say",
        [
            _ASKED,
            {"role": "assistant", "content": [_USED]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Exit code 1", "is_error": True},
                    {"type": "text", "text": "Then try another.", **_CACHED},
                ],
            },
        ],
        tools=_TOOLS,
        max_tokens=64_000,
    ),
    _claude_code(
        "a tool was found by search",
        [
            _ASKED,
            {"role": "assistant", "content": [{**_USED, "name": "read", "input": {"path": "a"}}]},
            _result([{"type": "tool_reference", "tool_name": "later"}]),
        ],
        tools=_TOOLS,
    ),
    _claude_code(
        "a title for the session",
        [{"role": "user", "content": f"<session>{ASK}</session>"}],
        system=[{"type": "text", "text": "Give the session a title."}],
        tools=[],
        thinking={"type": "disabled"},
        max_tokens=512,
        temperature=1,
        output_config={"format": {"type": "json_schema", "schema": parameters(["ok"], ok={"type": "boolean"})}},
        answer="json",
    ),
    messages(
        "claude code", "is there a quota", messages=[{"role": "user", "content": "quota"}], max_tokens=1, metadata={}
    ),
    _claude_code(
        "the web is searched by another request",
        [{"role": "user", "content": "Search the web for: files"}],
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["a.example"]}],
        left_out="tools left out: web_search_20250305",
    ),
    _claude_code(
        "the web must be searched",
        [{"role": "user", "content": "Search the web for: files"}],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "tool", "name": "web_search"},
        thinking={"type": "disabled"},
        answer="error",
        status=400,
        complaint="web_search",
    ),
    _claude_code(
        "what the web said",
        [
            _ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}},
                    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                    {"type": "text", "text": "Nothing.", "citations": []},
                ],
            },
            {"role": "user", "content": "And now?"},
        ],
        tools=[*_TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        left_out="tools left out: web_search_20250305; items left out: server_tool_use, web_search_tool_result",
    ),
    messages(
        "claude code",
        "its tokens are counted",
        path="/v1/messages/count_tokens?beta=true",
        messages=[_ASKED],
        tools=_TOOLS,
        system=_SYSTEM,
        thinking={"type": "enabled", "budget_tokens": 1024},
        headers=_HEADERS,
        answer="count",
    ),
    messages(
        "anthropic sdk",
        "tools whose schema the model is trained on",
        messages=[{"role": "user", "content": ASK}, {"role": "assistant", "content": [_USED]}, _result(LISTING)],
        tools=[
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "custom", **anthropic(READ)},
        ],
        max_tokens=4096,
    ),
    messages(
        "anthropic sdk",
        "tools that Anthropic runs",
        messages=[{"role": "user", "content": ASK}],
        tools=[
            {"type": "code_execution_20250825", "name": "code_execution"},
            {"type": "web_fetch_20250910", "name": "web_fetch"},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            {"type": "mcp_toolset", "mcp_server_name": "a"},
            anthropic(TODO_LIST, defer_loading=True, input_examples=[{"todos": []}], allowed_callers=["direct"]),
        ],
        mcp_servers=[{"type": "url", "name": "a", "url": "https://a.example/mcp"}],
        service_tier="auto",
        max_tokens=4096,
        left_out="tools left out: code_execution_20250825, web_fetch_20250910, tool_search_tool_regex_20251119, "
        "mcp_toolset, mcp",
    ),
    messages(
        "anthropic sdk",
        "texts as documents, and skills",
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "Notes",
                        "source": {"type": "text", "media_type": "text/plain", "data": LISTING},
                        "citations": {"enabled": True},
                    },
                    {
                        "type": "search_result",
                        "source": "https://a.example",
                        "title": "A",
                        "content": [{"type": "text", "text": LISTING}],
                    },
                    {"type": "text", "text": ASK},
                ],
            }
        ],
        container={"skills": [{"type": "anthropic", "skill_id": "pptx", "version": "latest"}]},
        max_tokens=4096,
        left_out="items left out: container",
    ),
    messages(
        "anthropic sdk",
        "a call is demanded, its arguments streamed at once",
        messages=[{"role": "user", "content": ASK}],
        tools=[anthropic(TOOLS[3], eager_input_streaming=True, strict=True), anthropic(EDIT)],
        tool_choice={"type": "tool", "name": "list", "disable_parallel_tool_use": True},
        max_tokens=8192,
        stream=True,
        headers={"anthropic-beta": "fine-grained-tool-streaming-2025-05-14"},
        answer="function_call",
    ),
    messages(
        "langchain-anthropic",
        "a tool has answered, and one must be used",
        path="/v1/messages",
        messages=[
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": [_USED]},
            _result(LISTING, is_error=False),
        ],
        tools=[anthropic(TOOLS[3])],
        tool_choice={"type": "any"},
        max_tokens=4096,
        stream=True,
        headers={"anthropic-version": "2026-10-21"},
        answer="function_call",
    ),
    messages(
        "vercel ai",
        "the limit of its model table",
        path="/v1/messages",
        messages=[{"role": "user", "content": [{"type": "text", "text": ASK}]}],
        system=[{"type": "text", "text": "Be brief."}],
        tools=[anthropic(BASH)],
        tool_choice={"type": "auto"},
        max_tokens=4096,
        stream=True,
    ),
    messages(
        "cline",
        "caches without tools",
        path="/v1/messages",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": ASK, **_CACHED}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
            {"role": "user", "content": [{"type": "text", "text": "<result>none</result>", **_CACHED}]},
        ],
        system=[{"type": "text", "text": "Be brief.", **_CACHED}],
        max_tokens=8192,
        temperature=0,
        stream=True,
    ),
    Recorded(
        client="anthropic sdk",
        shape="models",
        path="/v1/models?limit=20",
        headers={"anthropic-version": "2023-06-01", "x-api-key": "none"},
        answer="models",
    ),
]
