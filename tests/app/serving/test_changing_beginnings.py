"""Clients that put a line into their system prompt which differs from request to request: the known line is left out,
so that the next request finds its prefix."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.integration.agents import claude_code
from tests.support.harness import Server

_HEADER = "x-anthropic-billing-header: cc_version=2.1.{}.{}; cc_entrypoint=cli; cch={};"


def story(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(("river", "mill", "wheel", "stone", "gate", "horse", "king")) for _ in range(words))


def system_of(shape: str, version: int, told: str) -> Any:
    """Claude Code's system prompt as it sends it, and as gateways hand it on that join its blocks."""
    header = _HEADER.format(version, f"a{version}d", f"{version:05x}")
    recorded: Any = claude_code._SYSTEM
    first, *others = recorded
    assert first["text"].startswith("x-anthropic-billing-header: ")
    blocks = [{"type": "text", "text": header}, *others, {"type": "text", "text": told}]
    if shape == "blocks":
        return blocks
    joined = "\n".join(block["text"] for block in blocks)
    return joined if shape == "string" else [{"type": "text", "text": joined}]


@pytest.mark.parametrize("shape", ["blocks", "one block", "string"])
def test_the_next_request_of_claude_code_finds_its_prefix(server: Server, shape: str) -> None:
    def cached_tokens(version: int) -> int:
        body = {"model": "any", "max_tokens": 2, "system": system_of(shape, version, story(sum(map(ord, shape)), 80))}
        body |= {"messages": [{"role": "user", "content": "Go on."}], "model": server_model(server)}
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"].get("cache_read_input_tokens") or 0

    assert cached_tokens(330) < 64
    assert cached_tokens(331) > 80


def server_model(server: Server) -> str:
    return server.client.get("/v1/models").json()["data"][0]["id"]
