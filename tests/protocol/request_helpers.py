"""Requests of chat and completions, as a body makes them."""

from __future__ import annotations

import orjson

from protocol.body import parse_body
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest

VOCAB = 1000
SECRET = "the treasure lies under the third oak"
USER = [{"role": "user", "content": SECRET}]


def chat(**fields):
    return parse_body(ChatCompletionRequest, orjson.dumps({"model": "m", "messages": USER, **fields}))


def completion(**fields):
    return parse_body(CompletionRequest, orjson.dumps({"model": "m", "prompt": SECRET, **fields}))


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}
