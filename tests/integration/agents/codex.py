"""Codex: the Responses API, always streamed, nothing stored, the whole history in every request.

Which tools it sends depends on what it knows of the model. To one that it does not know, functions, a namespace of
functions and the provider's search; to OpenAI's, a free-text tool with a grammar for patches and a search for tools;
to the newest, all tools in an item of the conversation.
"""

from __future__ import annotations

from typing import Any

from tests.integration.agents.shapes import ASK, LISTING, Recorded, flat, function, parameters, responses

_SESSION = "01a20243-ce1d-7783-976d-768f48992c21"
_HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_exec",
    "session-id": _SESSION,
    "thread-id": _SESSION,
    "x-client-request-id": _SESSION,
    "x-codex-beta-features": "remote_compaction_v2",
}

_EXEC = flat(
    function(
        "exec_command",
        "Run a command.",
        parameters(
            ["cmd"],
            cmd={"type": "string", "description": "The command."},
            workdir={"type": "string"},
            tty={"type": "boolean"},
            yield_time_ms={"type": "number"},
            prefix_rule={"type": "array", "items": {"type": "string"}},
            sandbox_permissions={"type": "string", "enum": ["use_default", "require_escalated"]},
        ),
    ),
    strict=False,
)
_STDIN = flat(
    function("write_stdin", "Write to a command.", parameters(["session_id"], session_id={"type": "number"})),
    strict=False,
)
_GOAL = flat(function("get_goal", "Tell the goal.", parameters([])), strict=False)
_AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents that work for this one.",
    "tools": [
        flat(function("close_agent", "End an agent.", parameters(["target"], target={"type": "string"})), strict=False),
        flat(
            function(
                "wait_agent",
                "Wait for agents.",
                parameters(["targets"], targets={"type": "array", "items": {"type": "string"}}),
            ),
            strict=False,
        ),
    ],
}
PATCH_GRAMMAR = r"""start: head change+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?
change: "*** Delete File: " name LF
      | "*** Add File: " name LF added+
name: /[a-z]{1,8}/
added: "+" /[a-z]{0,8}/ LF
%import common.LF
"""
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files by a patch, which is plain text and not JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
_FIND_TOOLS = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find more tools.",
    "parameters": parameters(["query"], query={"type": "string"}, limit={"type": "number"}),
}
_SCRIPT = {
    "type": "namespace",
    "name": "functions",
    "description": "",
    "tools": [
        {
            "type": "custom",
            "name": "exec",
            "description": "Run a script.",
            "format": {
                "type": "grammar",
                "syntax": "lark",
                "definition": "start: FIRST? SOURCE\nFIRST: /\\/\\/ @exec:[^\\r\\n]*\\r?\\n/\nSOURCE: /[\\s\\S]+/\n",
            },
        },
        flat(function("wait", "Wait.", parameters([], ms={"type": "number"})), strict=False),
    ],
}


def _said(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


_BEGIN = [
    _said("developer", "You are an agent that works in a terminal."),
    _said("developer", "<skills>none</skills>", "<permissions>read only</permissions>"),
    _said("user", "<environment><cwd>/work</cwd></environment>"),
    _said("user", ASK),
]
_THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]}
_FIELDS: dict[str, Any] = {
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": _SESSION,
    "client_metadata": {"session_id": _SESSION, "x-codex-turn-metadata": '{"request_kind":"turn"}'},
}
_UNKNOWN_MODEL = [_EXEC, _STDIN, _AGENTS, _GOAL, {"type": "web_search", "external_web_access": False}]
_KNOWN_MODEL = [
    *(_EXEC, _STDIN, PATCH, _GOAL, _FIND_TOOLS),
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
]


def _codex(shape: str, history: list[dict[str, Any]], **fields: Any) -> Recorded:
    return responses("codex", shape, headers=_HEADERS, **{**_FIELDS, "input": [*_BEGIN, *history], **fields})


RECORDED = [
    _codex("first turn of a model it does not know", [], tools=_UNKNOWN_MODEL, left_out="tools left out: web_search"),
    _codex(
        "a command has run",
        [
            {**_THOUGHT, "content": None, "encrypted_content": "gAAAAB=="},
            {
                "type": "function_call",
                "status": "completed",
                "id": "fc_1",
                "name": "exec_command",
                "arguments": '{"cmd":"ls"}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": LISTING},
        ],
        tools=_UNKNOWN_MODEL,
        left_out="tools left out: web_search",
    ),
    _codex(
        "an agent of a namespace was called",
        [
            {
                "type": "function_call",
                "name": "close_agent",
                "namespace": "multi_agent_v1",
                "arguments": '{"target":"a"}',
                "call_id": "call_1",
            },
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "Closed."}, {"type": "input_text", "text": "Done."}],
            },
        ],
        tools=_UNKNOWN_MODEL,
        left_out="tools left out: web_search",
    ),
    _codex(
        "first turn of a model it knows",
        [],
        tools=_KNOWN_MODEL,
        reasoning={"effort": "medium"},
        text={"verbosity": "low"},
        left_out="tools left out: tool_search, web_search",
        grammars="apply_patch",
    ),
    _codex(
        "a patch was applied",
        [
            _THOUGHT,
            {
                "type": "custom_tool_call",
                "id": "ctc_1",
                "status": "completed",
                "call_id": "call_1",
                "name": "apply_patch",
                "input": "*** Begin Patch\n*** Add File: a\n+hi\n*** End Patch\n",
            },
            {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_1", "output": "Exit code: 0"},
        ],
        tools=_KNOWN_MODEL,
        text={"verbosity": "low"},
        left_out="tools left out: tool_search, web_search",
        grammars="apply_patch",
    ),
    _codex(
        "tools were searched for, and the web",
        [
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "a"},
            },
            {
                "type": "tool_search_call",
                "call_id": "call_1",
                "execution": "client",
                "status": "completed",
                "arguments": {"query": "mail"},
            },
            {
                "type": "tool_search_output",
                "call_id": "call_1",
                "execution": "client",
                "status": "completed",
                "tools": [],
            },
        ],
        tools=_KNOWN_MODEL,
        left_out="tools left out: tool_search, web_search; "
        "items left out: web_search_call, tool_search_call, tool_search_output",
        grammars="apply_patch",
    ),
    _codex(
        "all tools in the conversation",
        [],
        input=[{"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [_SCRIPT, _AGENTS]}, *_BEGIN],
        grammars="functions__exec",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "context": "all_turns"},
        text={"verbosity": "low"},
    ),
    _codex(
        "an image was looked at, and old items may be made short",
        [
            {"type": "function_call", "call_id": "call_1", "name": "view_image", "arguments": '{"path":"a.png"}'},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}],
            },
        ],
        tools=[],
        reasoning={"effort": "medium", "summary": "none"},
        context_management=[{"type": "compaction", "compact_threshold": 200_000}],
        left_out="items left out: input_image",
        without_effect="context_management",
    ),
    _codex(
        "its first shell",
        [
            {
                "type": "local_shell_call",
                "id": "lsh_1",
                "call_id": "call_1",
                "status": "completed",
                "action": {
                    "type": "exec",
                    "command": ["bash", "-lc", "ls"],
                    "timeout_ms": 1000,
                    "working_directory": "/work",
                    "env": {},
                    "user": None,
                },
            },
            {"type": "local_shell_call_output", "id": "call_1", "call_id": "call_1", "output": LISTING},
        ],
        tools=[{"type": "local_shell"}],
        instructions="You are an agent.",
    ),
    _codex(
        "an answer of a given form",
        [],
        tools=[],
        text={
            "verbosity": "low",
            "format": {
                "type": "json_schema",
                "strict": True,
                "name": "codex_output_schema",
                "schema": parameters(["done"], done={"type": "boolean"}),
            },
        },
        answer="json",
    ),
    _codex("its history made short", [_said("user", "Sum up what was done.")], tools=[], instructions=""),
    Recorded(
        client="codex",
        shape="its history made short elsewhere",
        path="/v1/responses/compact",
        body={"model": "any", "input": _BEGIN, "instructions": "", "tools": []},
        answer="error",
        status=404,
        complaint="compact",
    ),
    Recorded(client="codex", shape="models", path="/v1/models?client_version=0.169.0", answer="models"),
]
