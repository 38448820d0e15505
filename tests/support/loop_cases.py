"""Requests that are much work to check, to render, to run or to answer: for every route what is cheap to send."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {f"property_{number}": {"type": "string", "description": "d" * 40} for number in range(60)},
}


@dataclass(frozen=True)
class Case:
    """One request. `status` is what it is answered with."""

    name: str
    path: str
    body: dict[str, Any]
    status: int = 200

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


def ids(length: int, first: int = 0) -> list[int]:
    """A prompt of that many tokens, unlike one that begins elsewhere."""
    return [1000 + (first * 31 + number * 7) % 40000 for number in range(length)]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, **fields}


def tools(number: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": "d" * 100, "parameters": SCHEMA}}
        for index in range(number)
    ]


def cases() -> list[Case]:
    """In the order of the routes."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"turn {number}"} for number in range(10_001)]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b c"} for _ in range(1000)]} for _ in range(100)]
    texts = ["word " * 1000] * 512
    items = [{"type": "message", **turn} for turn in turns]
    words = [f"forbidden {number}" for number in range(128)]
    one = {"max_tokens": 1, "temperature": 0}
    many = {**one, "prompt": [ids(2, number) for number in range(512)]}
    flat_tools = [{"type": "function", **tool["function"]} for tool in tools(300)]
    claude_tools = [{"name": f"tool_{index}", "input_schema": SCHEMA} for index in range(300)]
    bare_tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(1024)]
    streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    likely = {"temperature": 0, "logprobs": 20}
    short = [ids(4, number) for number in range(512)]
    claude = {"messages": turns[:1], "max_tokens": 1, "tools": claude_tools}
    return [
        Case("128 bad_words x 512 prompts", COMPLETIONS, {**many, "bad_words": words}),
        Case("bad_words of 128 characters", COMPLETIONS, {**one, "prompt": "a", "bad_words": ["x y " * 32] * 128}),
        Case("16,384 allowed_token_ids x 512", COMPLETIONS, {**many, "allowed_token_ids": list(range(16384))}),
        Case("1,024 logit_bias x 512 prompts", COMPLETIONS, {**many, "logit_bias": {str(i): 1 for i in range(1024)}}),
        Case("16 stop strings x 512 prompts", COMPLETIONS, {**many, "stop": ["s" * 1000 + str(i) for i in range(16)]}),
        Case("512 prompts of 5,000 characters", COMPLETIONS, {**one, "prompt": texts, "truncate_prompt_tokens": 1}),
        Case("512 prompts of 1,000 ids", COMPLETIONS, {**one, "prompt": [*[ids(1000)] * 511, [10**6]]}, 400),
        Case("a million ids", COMPLETIONS, {**one, "prompt": ids(1_000_000)}, 400),
        Case("n 128 x 512 prompts", COMPLETIONS, {**many, "n": 128}, 400),
        Case("n 128 x 4 prompts, streamed", COMPLETIONS, {**one, "prompt": short[:4], "n": 128, **streamed}),
        Case(
            "n 128, logprobs 20, streamed",
            COMPLETIONS,
            {**likely, "prompt": "a", "n": 128, "max_tokens": 4, **streamed},
        ),
        Case("n 128, top_logprobs 20", CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=8)),
        Case("prompt_logprobs 20", COMPLETIONS, {**one, "prompt": ids(3000), "prompt_logprobs": 20}),
        Case("echo of 512 prompts, logprobs 20", COMPLETIONS, {**one, **likely, "prompt": short, "echo": True}),
        Case("the same, streamed", COMPLETIONS, {**one, **likely, "prompt": short, "echo": True, "stream": True}),
        Case(
            "echo of a long prompt, streamed",
            COMPLETIONS,
            {**one, **likely, "prompt": ids(3000, 1), "echo": True, "stream": True},
        ),
        Case("return_token_ids of 512 prompts", COMPLETIONS, {**one, "prompt": short, "return_token_ids": True}),
        Case("10,001 messages", CHAT, chat(messages=turns), 400),
        Case("100,000 parts", CHAT, chat(messages=parts), 413),
        Case("16,000 parts", CHAT, chat(messages=parts[:16]), 400),
        Case("2,000 messages", CHAT, chat(messages=turns[:2001]), 400),
        Case("300 tools", CHAT, chat(tools=tools(300)), 400),
        Case("1,024 tools of a name alone", CHAT, chat(tools=bare_tools), 400),
        Case("300 tools, one is demanded", CHAT, chat(tools=tools(300), tool_choice="required"), 400),
        Case("12 tools", CHAT, chat(tools=tools(12)), 400),
        Case("documents", CHAT, chat(documents=[{"title": "t", "text": "x" * 1000}] * 200)),
        Case("4 MB of text", CHAT, chat(messages=[{"role": "user", "content": "word " * 800_000}]), 400),
        Case("10,001 items", RESPONSES, {"input": items}, 400),
        Case("500 items, stored", RESPONSES, {"input": items[:501], "max_output_tokens": 1}),
        Case("10,001 items counted", RESPONSES + "/input_tokens", {"input": items}),
        Case("10,001 items, truncated", RESPONSES, {"input": items, "truncation": "auto", "max_output_tokens": 1}),
        Case("300 tools for Responses", RESPONSES, {"input": "a", "tools": flat_tools}, 400),
        Case("10,001 turns", "/v1/messages", {"messages": turns, "max_tokens": 1}, 400),
        Case("1,024 large tools", CHAT, chat(tools=tools(1024)), 413),
        Case("10,001 turns counted", "/v1/messages/count_tokens", {"messages": turns}),
        Case("300 tools for Messages", "/v1/messages", claude, 400),
        Case("512 inputs", "/v1/embeddings", {"input": short}),
        Case("512 texts", "/v1/embeddings", {"input": texts, "truncate_prompt_tokens": 1}),
        Case("a long text", "/tokenize", {"prompt": "a b " * 7_000, "return_token_strs": True}),
        Case("a text that is too long", "/tokenize", {"prompt": "word " * 1_000_000}, 400),
        Case("a long text of one word", "/tokenize", {"prompt": "a" * 60_000}),
        Case("a million tokens", "/detokenize", {"tokens": ids(1_000_000)}),
        Case("a body of numbers near the limit", "/detokenize", {"tokens": [1] * 5_000_000}, 413),
        Case("a body of objects near the limit", CHAT, chat(messages=[{}] * 2_000_000), 413),
        Case("unknown fields", CHAT, chat(metadata={str(i): "x" * 10 for i in range(50_000)})),
        Case("unknown fields near the limit", CHAT, chat(metadata={str(i): "x" for i in range(1_000_000)}), 413),
        Case("empty arrays near the limit", CHAT, chat(unknown=[[]] * 4_000_000), 413),
        Case("text that looks like structure", CHAT, chat(metadata='[{":",' * 1_000_000)),
    ]
