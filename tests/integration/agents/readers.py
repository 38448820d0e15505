"""Reads answers as the official SDKs do, and holds them to the order of their events and the sum of their usage.

Every function returns what the answer is, in the words of `shapes.Answer`.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import orjson
from anthropic.types import MessageTokensCount
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)

# One letter for each event of an item, and how they may follow each other.
_LETTERS = {
    "output_item.added": "<",
    "output_item.done": ">",
    "content_part.added": "(",
    "content_part.done": ")",
    "output_text.delta": "t",
    "output_text.done": "T",
    "reasoning_text.delta": "r",
    "reasoning_text.done": "R",
    "function_call_arguments.delta": "f",
    "function_call_arguments.done": "F",
    "custom_tool_call_input.delta": "c",
    "custom_tool_call_input.done": "C",
}
_ITEMS = re.compile(r"(<\(t*T\)>|<\(r*R\)>|<f*F>|<c*C>|<>)+")


# --- chat and completions


def read_chat(body: bytes) -> str:
    answer = ChatCompletion.model_validate_json(body)
    _check_usage(answer.usage, "prompt_tokens", "completion_tokens")
    return _chat_answer(answer)


def read_chat_stream(events: list[Any], *, usage: bool) -> str:
    assert events[-1] == "[DONE]"
    state = ChatCompletionStreamState()
    chunks = [_chunk(event) for event in events[:-1]]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    if usage:
        assert chunks[-1].choices == []
        _check_usage(chunks[-1].usage, "prompt_tokens", "completion_tokens")
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason is not None]
    assert len(ends) == 1
    assert all(chunk.choices for chunk in (chunks[:-1] if usage else chunks))
    for chunk in chunks:
        state.handle_chunk(chunk)
    return _chat_answer(state.current_completion_snapshot)


def _chunk(event: dict[str, Any]) -> ChatCompletionChunk:
    calls = [call for choice in event["choices"] for call in choice["delta"].get("tool_calls") or ()]
    # The type knows functions only; what is wrapped in it all the same is what the SDK's users get.
    custom = any("custom" in call for call in calls)
    return ChatCompletionChunk.construct(**event) if custom else ChatCompletionChunk.model_validate(event)


def _chat_answer(answer: ChatCompletion) -> str:
    message = answer.choices[0].message
    assert message.role == "assistant"
    if message.function_call is not None:
        orjson.loads(message.function_call.arguments)
        return "function_call"
    kinds = []
    for call in message.tool_calls or ():
        assert call.id
        if call.type == "function":
            orjson.loads(call.function.arguments)
        kinds.append("function_call" if call.type == "function" else "custom_tool_call")
    if kinds:
        return kinds[0]
    return _text_answer(message.content or "")


def read_completion(body: bytes) -> str:
    answer = Completion.construct(**orjson.loads(body))  # the type knows neither an echo's nulls nor unfinished choices
    _check_usage(answer.usage, "prompt_tokens", "completion_tokens")
    for choice in answer.choices:
        assert choice.finish_reason is not None
        if choice.logprobs is not None:
            assert choice.logprobs.tokens is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    return "text"


def read_completion_stream(events: list[Any]) -> str:
    assert events[-1] == "[DONE]"
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert set(ends[:-1]) == {None}
    assert ends[-1] is not None
    return "text"


# --- Responses


def read_response(body: bytes) -> str:
    return _response_answer(Response.model_validate_json(body, strict=True))


def read_response_stream(events: list[dict[str, Any]]) -> str:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        RESPONSE_EVENT.validate_json(orjson.dumps(event), strict=True)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] in ("completed", "incomplete")
    order = "".join(_LETTERS[name] for name in names[2:-1])
    assert _ITEMS.fullmatch(order), names
    output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert output == events[-1]["response"]["output"]
    return _response_answer(Response.model_validate_json(orjson.dumps(events[-1]["response"]), strict=True))


def _response_answer(response: Response) -> str:
    assert response.usage is not None
    usage = response.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.input_tokens_details.cached_tokens <= usage.input_tokens
    item = next(item for item in response.output if item.type != "reasoning")
    if item.type == "function_call":
        orjson.loads(item.arguments)
    return _text_answer(response.output_text) if item.type == "message" else item.type


# --- Messages


def read_message(body: bytes) -> str:
    return _message_answer(BetaMessage.model_validate_json(body, strict=True))


def read_message_stream(events: list[dict[str, Any]]) -> str:
    for event in events:
        if event["type"] != "ping":
            MESSAGE_EVENT.validate_json(orjson.dumps(event), strict=True)
    names = [event["type"] for event in events if event["type"] != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    blocks: list[dict[str, Any]] = []
    for event in events:  # blocks do not overlap, and are counted from 0
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "pieces": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                blocks[-1]["pieces"] += event["delta"].get("partial_json") or event["delta"].get("text") or ""
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                block = blocks[-1]
                pieces = block.pop("pieces")
                block |= {"input": orjson.loads(pieces or "{}")} if block["type"] == "tool_use" else {"text": pieces}
    end = events[-2]
    assert end["usage"]["output_tokens"] > 0
    message |= {"content": blocks, **end["delta"], "usage": {**message["usage"], **end["usage"]}}
    return _message_answer(BetaMessage.model_validate_json(orjson.dumps(message)))


def _message_answer(message: BetaMessage) -> str:
    assert message.stop_reason is not None
    assert message.usage.input_tokens >= 0
    called = any(block.type == "tool_use" for block in message.content)
    assert called == (message.stop_reason == "tool_use")
    if called:
        return "function_call"
    return _text_answer("".join(block.text for block in message.content if block.type == "text"))


# ---


def _text_answer(text: str) -> str:
    try:
        return "json" if isinstance(orjson.loads(text), dict) else "text"
    except orjson.JSONDecodeError:
        return "text"


def _check_usage(usage: Any, *parts: str) -> None:
    assert usage is not None
    assert sum(getattr(usage, part) for part in parts) == usage.total_tokens


# --- routes beside


def read_other(path: str, body: bytes) -> str:
    match path:
        case "/v1/messages/count_tokens":
            assert MessageTokensCount.model_validate_json(body, strict=True).input_tokens > 0
            return "count"
        case "/v1/models":
            cards = orjson.loads(body)["data"]
            assert cards[0]["id"]
            return "models"
        case _:
            answer = CreateEmbeddingResponse.construct(**orjson.loads(body))
            assert answer.usage.total_tokens > 0
            assert all(base64.b64decode(item.embedding) for item in answer.data)  # type: ignore[arg-type]
            return "vectors"
