"""Event streams put together again, to be compared with whole answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.harness import Server


@dataclass
class StreamedChoice:
    """One choice as its chunks give it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Streamed:
    """One response."""

    choices: list[StreamedChoice]
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None  # of the first choice
    num_chunks: int = 0


def stream(server: Server, path: str, body: dict[str, Any]) -> Streamed:
    """Ask for a stream with usage and join its chunks. Asserts what every stream promises."""
    body = {"temperature": 0, **body, "stream": True, "stream_options": {"include_usage": True}}
    streamed = Streamed([])
    by_index: dict[int, StreamedChoice] = {}
    heads = set()
    with server.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = "".join(answer.iter_text()).split("\n")  # `iter_lines` also splits at U+2028 and others inside JSON
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in events:
        chunk = json.loads(event)
        assert "error" not in chunk, chunk
        heads.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        streamed.num_chunks += 1
        if not chunk["choices"]:
            assert streamed.usage is None
            streamed.usage = chunk["usage"]
            continue
        assert chunk["usage"] is None
        (delta,) = chunk["choices"]
        choice = by_index.setdefault(delta["index"], StreamedChoice())
        assert choice.finish_reason is None, "a chunk after the choice's last one"
        _add(choice, delta)
        found = chunk.get("prompt_token_ids") or delta.get("prompt_token_ids")
        if found is not None and streamed.prompt_token_ids is None:
            streamed.prompt_token_ids = found
    assert len(heads) == 1
    assert streamed.usage is not None
    streamed.choices = [choice for _, choice in sorted(by_index.items())]
    assert all(choice.finish_reason is not None for choice in streamed.choices)
    return streamed


def _add(choice: StreamedChoice, delta: dict[str, Any]) -> None:
    choice.text += (delta["delta"].get("content") or "") if "delta" in delta else delta["text"]
    choice.token_ids += delta.get("token_ids") or []
    if delta["logprobs"] is not None:
        if choice.logprobs is None:
            choice.logprobs = {name: [] for name, column in delta["logprobs"].items() if column is not None}
        for name in choice.logprobs:
            choice.logprobs[name] += delta["logprobs"][name]
    choice.finish_reason = delta["finish_reason"]
    choice.stop_reason = delta.get("stop_reason")
