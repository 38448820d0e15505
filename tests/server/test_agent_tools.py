"""What coding agents offer beside functions, through the official SDKs and on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, Server

QUESTION: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0}
WARNING = "x-headrace-warning"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 1}),
        ("/v1/messages?beta=true", {"messages": QUESTION, "max_tokens": 1}),
    ],
)
def test_tools_that_nobody_serves_are_left_out_and_told(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    counted = "headrace:tools_left_out_total{type=web_search}"
    before = server.metrics().samples[counted]
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "a\nb: c"}]
    answer = server.post(path, {**SHORT, **body, "tools": tools, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING] == "tools left out: web_search_20250305, other (nobody serves them here)"
    assert server.metrics().samples[counted] == before + 1
    without = server.post(path, {**SHORT, **body, "tools": [], "stream": stream})
    assert without.status_code == 200
    assert WARNING not in without.headers
