"""Answers of POST /v1/messages: one message, or its events.

A message is blocks of text, thinking and tool use, which never overlap in a stream. Both writers read the same parts
(`protocol.syntax.message_parts`), so a streamed and a whole answer are the same message. The exception is an incomplete
call: a stream has already announced it, a whole message shows it as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

from engine.messages import FinishReason, RequestOutput
from protocol.answers import AnswerContext, Head, event_frame, raise_if_failed
from protocol.anthropic.messages import MessagesRequest, envelope
from protocol.errors import ApiError
from protocol.syntax import message_parts

_TEXT_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


class MessageStreamWriter:
    def __init__(self, request: MessagesRequest, answer: AnswerContext) -> None:
        self._head = answer.head
        self._request_id = answer.request_id  # for errors
        self._parser = answer.parser()
        self._shows_thinking = request.shows_thinking
        self._max_tokens = request.max_tokens
        self._last: RequestOutput | None = None
        self._blocks = 0  # blocks that have begun
        self._open: type[message_parts.MessagePart] | None = None  # the kind of parts in the open block
        self._signature = hashlib.blake2b()

    def feed_output(self, output: RequestOutput) -> bytes:
        raise_if_failed(output)
        frames = []
        if self._last is None:
            message = _message(self._head, [], _usage(output, self._parser, output_tokens=0))
            frames.append(_event("message_start", {"message": message}))
        self._last = output
        for part in self._parser.read(output):
            frames += self._part(part)
        return b"".join(frames)

    def finish_stream(self) -> bytes:
        assert self._last is not None
        frames = [] if self._blocks else self._begin(message_parts.ContentDelta, {"type": "text", "text": ""})
        frames += self._close()
        delta = {**_stop(self._last, self._parser, self._max_tokens), "container": None, "stop_details": None}
        usage = _usage(self._last, self._parser)
        frames += [_event("message_delta", {"delta": delta, "usage": usage}), _event("message_stop", {})]
        return b"".join(frames)

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput] = ()) -> bytes:
        return event_frame("error", envelope(error, self._request_id))

    def _part(self, part: message_parts.MessagePart) -> list[bytes]:
        match part:
            case message_parts.ContentDelta(text):
                frames = self._begin_unless_open(message_parts.ContentDelta, {"type": "text", "text": ""})
                return [*frames, _TEXT_DELTA % (self._blocks - 1, orjson.dumps(text))]
            case message_parts.ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                frames = self._begin_unless_open(message_parts.ReasoningDelta, block)
                self._signature.update(text.encode())
                return [*frames, self._delta("thinking_delta", thinking=text)] if self._shows_thinking else frames
            case message_parts.ToolCallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._close() + self._begin(message_parts.ToolCallArguments, call)
            case message_parts.ToolCallArguments(_, fragment) | message_parts.ToolCallInput(
                _, fragment
            ):  # no tool here takes free text
                return [self._delta("input_json_delta", partial_json=fragment)]

    def _begin_unless_open(self, kind: type[message_parts.MessagePart], block: dict[str, Any]) -> list[bytes]:
        return [] if self._open is kind else self._close() + self._begin(kind, block)

    def _begin(self, kind: type[message_parts.MessagePart], block: dict[str, Any]) -> list[bytes]:
        self._open = kind
        self._blocks += 1
        frames = [_event("content_block_start", {"index": self._blocks - 1, "content_block": block})]
        if self._blocks == 1:
            frames.append(_event("ping", {}))
        return frames

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        frames = []
        if self._open is message_parts.ReasoningDelta:
            frames.append(self._delta("signature_delta", signature=self._signature.hexdigest()))
            self._signature = hashlib.blake2b()
        self._open = None
        return [*frames, _event("content_block_stop", {"index": self._blocks - 1})]

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": {"type": kind, **fields}})


class MessageBodyWriter:
    def __init__(self, request: MessagesRequest, answer: AnswerContext) -> None:
        self._head = answer.head
        self._parser = answer.parser()
        self._shows_thinking = request.shows_thinking
        self._max_tokens = request.max_tokens
        self._parts: list[message_parts.MessagePart] = []
        self._last: RequestOutput | None = None

    def feed_output(self, output: RequestOutput) -> None:
        raise_if_failed(output)
        self._last = output
        self._parts += self._parser.read(output)

    def body(self) -> bytes:
        assert self._last is not None
        message = _message(self._head, self._blocks(), _usage(self._last, self._parser))
        return orjson.dumps(message | _stop(self._last, self._parser, self._max_tokens))

    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for part in message_parts.join(self._parts):
            match part:
                case message_parts.ContentDelta(text):
                    blocks.append({"type": "text", "text": text})
                case message_parts.ReasoningDelta(text):
                    signature = hashlib.blake2b(text.encode()).hexdigest()
                    shown = text if self._shows_thinking else ""
                    blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
                case message_parts.ToolCallStart(index, _, name) if index in self._parser.cut_calls:
                    blocks.append({"type": "text", "text": f'{{"name": {orjson.dumps(name).decode()}, "arguments": '})
                case message_parts.ToolCallStart(_, call_id, name):
                    blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case message_parts.ToolCallArguments(index, fragment) if index in self._parser.cut_calls:
                    blocks[-1]["text"] += fragment
                case message_parts.ToolCallArguments(_, fragment):  # an object as the model wrote it, as in a stream
                    blocks[-1]["input"] = orjson.Fragment(fragment)
        return blocks or [{"type": "text", "text": ""}]


def _message(head: Head, blocks: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": usage,
    }


def _stop(output: RequestOutput, parser: message_parts.MessageParser, max_tokens: int) -> dict[str, Any]:
    """Return the message's stop reason. An abort by the operator and an end within a call become `max_tokens`."""
    if output.finish_reason is FinishReason.LENGTH and output.num_output_tokens != max_tokens:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if output.finish_reason is not FinishReason.STOP or parser.cut_calls:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if parser.num_tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(
    output: RequestOutput, parser: message_parts.MessageParser, *, output_tokens: int | None = None
) -> dict[str, Any]:
    """Return the token counts. `input_tokens` were not in the cache: the three inputs add up to the prompt."""
    thinking = parser.num_reasoning_tokens
    return {
        "input_tokens": output.num_prompt_tokens - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": output.num_output_tokens if output_tokens is None else output_tokens,
        "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        "cache_creation": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event_frame(name, {"type": name, **fields})
