"""Grammars of strangers: slow ones delay nobody for long, and the client corrects one that cannot be followed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.selection import slow_except
from tests.support.harness import Server
from tests.support.raw_client import RawClient, sse_events
from tests.support.tiny_model import tiny_server

KEYS = ("flood-secret", "guest-secret")
NUM_SLOW = 16
SMALL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Server]:
    with tiny_server(api_keys=",".join(KEYS), max_num_seqs=32) as running:
        running.client.headers["authorization"] = f"Bearer {KEYS[1]}"
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="module", params=slow_except(["thread", "process"], "thread"))
def open_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with tiny_server(engine=request.param, max_num_seqs=32) as running:
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log


# --- who waits for whom


def slow_schema(number: int) -> dict[str, Any]:
    """Some tenths of a second of the compiler's time: a chain of references of its own."""
    links: dict[str, Any] = {f"{i}x{number}": {"items": {"$ref": f"#/$defs/{i + 1}x{number}"}} for i in range(1500)}
    return {"$defs": links | {f"1500x{number}": {"type": "string"}}, "$ref": f"#/$defs/0x{number}"}


def ask(server: Server, stack: ExitStack, schema: dict[str, Any], key: str) -> RawClient:
    """A request on a connection of its own, sent and not waited for."""
    client = stack.enter_context(server.connect())
    body = {"prompt": "Hi", "max_tokens": 1, "guided_json": schema}
    client.post("/v1/completions", body, {"authorization": f"Bearer {key}"} if key else None)
    return client


def num_done(server: Server) -> int:
    return server.metrics().http_requests("/v1/completions", "2xx")


def check_that_others_are_soon_done(server: Server, flood: str, guest: str, schema: dict[str, Any]) -> None:
    before = num_done(server)
    with ExitStack() as stack:
        for number in range(NUM_SLOW):
            ask(server, stack, slow_schema(number), flood)
        server.poll(lambda: num_done(server), lambda done: done > before)  # they are in the queue
        begun = num_done(server)
        assert ask(server, stack, schema, guest).read_head().status_code == 200
        assert num_done(server) - begun <= NUM_SLOW // 2, "most of the others are still waiting"
    server.wait_idle()


@pytest.mark.slow
def test_beside_slow_grammars_of_one_tenant_even_a_slow_one_of_another_has_its_turn(locked_server: Server) -> None:
    check_that_others_are_soon_done(locked_server, *KEYS, slow_schema(NUM_SLOW))


@pytest.mark.slow
def test_where_all_are_one_tenant_a_small_grammar_passes_the_slow_ones(open_server: Server) -> None:
    check_that_others_are_soon_done(open_server, "", "", SMALL)


# --- what cannot be followed

# After three hundred letters, more ways to read on than the parser's limits allow: too late for the compiler to see.
LATE = "^[a-z]{400}(.{1,500}a){2,500}$"
LATE_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": LATE}}, "required": ["a"]}
TOOL = {"name": "f", "parameters": LATE_SCHEMA}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]

CASES = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LATE_SCHEMA}}}, "response_format"),
    (CHAT, {"structured_outputs": {"regex": LATE}}, "structured_outputs"),
    (CHAT, {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}, "tools"),
    (COMPLETIONS, {"guided_regex": LATE}, "guided_regex"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": LATE_SCHEMA}}}, "text.format"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": LATE_SCHEMA}}}, "output_config.format"),
]
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1000},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1000},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1000},
    MESSAGES: {"messages": HELLO, "max_tokens": 1000},
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "fields", "param"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_grammar_that_becomes_too_complex_is_the_clients_to_mend(
    open_server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    body = USUAL[path] | fields | {"temperature": 0}
    answer = open_server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert "structured_output " not in error["message"]
    if path != MESSAGES:  # its envelope has room for words only
        assert (error["param"], error["code"]) == (param, "grammar_too_complex")

    with open_server.connect() as client:
        client.post(path, body | {"stream": True})
        head = client.read_head()
        assert head.status_code in (200, 400)
        events = list(sse_events(client.chunks())) if head.status_code == 200 else [json.loads(client.read_body())]
    told = json.dumps(events[-4:])
    assert "invalid_request_error" in told, told
    assert "may be sent again" not in told
    assert "server_error" not in told
    assert open_server.wait_idle().finished["error"] == 0


def test_a_grammar_that_the_compiler_finds_too_complex_is_called_so(open_server: Server) -> None:
    definition = f'start: {"one? " * 6000}\none: "a" | "b"'
    answer = open_server.post(COMPLETIONS, {"prompt": "Hi", "guided_grammar": definition})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammar_too_complex"
    assert answer.json()["error"]["param"] == "guided_grammar"


DIVISOR = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 19_999_999}}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"guided_json": DIVISOR}, "guided_json", "multipleOf takes at most 10000"),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": DIVISOR, "strict": True}}],
                "tool_choice": "required",
            },
            "tools",
            "multipleOf takes at most 10000",
        ),
        (
            COMPLETIONS,
            {"guided_json": {"type": "array"}, "guided_whitespace_pattern": "a" * 1025},
            "guided_json",
            "at most 1024 characters in its whitespace pattern",
        ),
    ],
)
def test_what_would_take_minutes_to_compile_is_refused_at_once_by_its_keyword(
    open_server: Server, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = open_server.post(path, USUAL[path] | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
