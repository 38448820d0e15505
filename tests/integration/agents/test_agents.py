"""Requests as today's coding agents, libraries, chat windows and benchmarks send them, at a server as it is by default.

Each gets the status, the kind of answer and the warning that its entry names, and the answer is read as strictly as
the official SDKs' types are (`tests.integration.agents.readers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agents import benchmarks, chat_agents, chat_interfaces, claude_code, codex, libraries, readers
from tests.integration.agents.shapes import Recorded
from tests.support.harness import Server
from tests.support.raw_client import sse_events

CORPUS = [
    recorded
    for part in (codex, claude_code, chat_agents, libraries, chat_interfaces, benchmarks)
    for recorded in part.RECORDED
]
WARNING = "x-headrace-warning"
END_OF_TEXT = 2  # the token that ends the embedded model's turns
BRIEF = {"temperature": 0, "min_tokens": 1, "logit_bias": {END_OF_TEXT: 100}}
"""What no client sends: the answer ends after its second token, whatever limit the client has named."""


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    """What the harness sets for speed is left as it is by default."""
    unset = dict.fromkeys(("dtype", "kv_cache_memory", "max_model_len", "num_threads"), "")
    with Server(**unset) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("recorded", CORPUS, ids=str)
def test_recorded_request_is_answered(default_server: Server, recorded: Recorded) -> None:
    if recorded.body is None:
        answer = default_server.client.get(recorded.path, headers=recorded.headers)
    else:
        answer = default_server.post(recorded.path, _brief(recorded), **recorded.headers)
    assert answer.status_code == recorded.status, answer.text
    assert answer.headers.get(WARNING) == recorded.warning
    if recorded.answer == "error":
        error = answer.json()["error"]  # a text under /api, as in Ollama's API
        assert recorded.complaint in (error if isinstance(error, str) else error["message"])
    else:
        assert _read(recorded, answer.content) == recorded.answer


def test_corpus_names_every_request_once() -> None:
    names = [str(recorded) for recorded in CORPUS]
    assert len(set(names)) == len(names)


def _brief(recorded: Recorded) -> dict[str, Any]:
    assert recorded.body is not None
    if recorded.answer in ("count", "vectors", "error") or recorded.body.get("ignore_eos"):
        return recorded.body
    return recorded.body | BRIEF | ({} if recorded.answer == "text" else {"min_tokens": 0})


def _read(recorded: Recorded, content: bytes) -> str:
    body: dict[str, Any] = recorded.body or {}
    events: list[Any] = list(sse_events([content])) if body.get("stream") else []
    match recorded.path.partition("?")[0]:
        case "/v1/chat/completions" if events:
            options = body.get("stream_options") or {}
            return readers.read_chat_stream(events, usage=options.get("include_usage", False))
        case "/v1/chat/completions":
            return readers.read_chat(content)
        case "/v1/completions":
            return readers.read_completion_stream(events) if events else readers.read_completion(content)
        case "/v1/responses":
            return readers.read_response_stream(events) if events else readers.read_response(content)
        case "/v1/messages":
            return readers.read_message_stream(events) if events else readers.read_message(content)
        case path:
            return readers.read_other(path, content)
