"""Answers of /api/chat, /api/generate and /api/embed: lines of JSON, or one object.

Both writers turn the parts of a message into the same pieces, so the pieces of a stream add up to the body. A call is
one piece, written when it is complete; an incomplete call is text, in streams too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import orjson

from engine.messages import FinishReason, RequestOutput, TokenLogprobs
from protocol.answers import AnswerContext, raise_if_failed
from protocol.errors import ApiError
from protocol.ollama.requests import EmbedRequest, OllamaRequest, PromptEmbedRequest
from protocol.openai.embeddings import PrefillWriter, finished_vector
from protocol.openai.logprobs import ChatLogprobs, array_of, entries_of, pieces
from protocol.syntax import message_parts

STREAM_TYPE = "application/x-ndjson"

KEEP_ALIVE = b'{"message":{"role":"assistant","content":""},"response":"","done":false}\n'
"""A line without text, for both kinds of streams: clients cannot read an empty line."""

# Python's httpx, on which the official client stands, ends a line at these characters, too.
_LINE_ENDS = re.compile("\u0085|\u2028|\u2029".encode())

Piece = dict[str, Any]
"""Part of a message: one of `content`, `thinking` and `tool_calls`."""


def json_line(value: Mapping[str, Any]) -> bytes:
    return _LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), orjson.dumps(value)) + b"\n"


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    return orjson.dumps({"error": error.message})


def error_line(error: ApiError, request_id: str | None = None) -> bytes:
    return json_line({"error": error.message})


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class _OllamaWriter:
    def __init__(self, request: OllamaRequest, answer: AnswerContext) -> None:
        self._is_chat = request.asks_in == "messages"
        self._head = {"model": answer.head.model, "created_at": timestamp(answer.head.created)}
        self._durations = answer.durations
        self._parser = answer.parser()
        self._write_logprobs = ChatLogprobs(answer.token_bytes)
        self._last: RequestOutput | None = None
        self._call: tuple[int, str, str] | None = None  # the number, id and name of the call that is being written
        self._arguments: list[str] = []

    def _read(self, output: RequestOutput) -> list[Piece]:
        raise_if_failed(output)
        self._last = output
        found: list[Piece] = []
        for part in message_parts.join(self._parser.read(output)):
            match part:
                case message_parts.ContentDelta(text):
                    found += [*self._end_call(), {"content": text}]
                case message_parts.ReasoningDelta(text):
                    found += [*self._end_call(), {"thinking": text}]
                case message_parts.ToolCallStart(index, call_id, name):
                    found += self._end_call()
                    self._call = index, call_id, name
                case message_parts.ToolCallArguments(_, text) | message_parts.ToolCallInput(_, text):
                    self._arguments.append(text)
        return found if output.finish_reason is None else found + self._end_call()

    def _end_call(self) -> list[Piece]:
        if self._call is None:
            return []
        (index, call_id, name), arguments = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if index in self._parser.cut_calls:
            return [{"content": f'{{"name": {orjson.dumps(name).decode()}, "arguments": {arguments}'}]
        written = orjson.Fragment(arguments.replace("\n", " ").replace("\r", " ") or "{}")  # of blanks between values
        return [{"tool_calls": [{"id": call_id, "function": {"index": index, "name": name, "arguments": written}}]}]

    def _answer(self, piece: Piece, entries: Iterable[TokenLogprobs] = (), **end: Any) -> dict[str, Any]:
        if self._is_chat:
            shown: dict[str, Any] = {"message": {"role": "assistant", "content": "", **piece}}
        else:
            shown = {"response": piece.get("content", ""), **{k: v for k, v in piece.items() if k != "content"}}
        if entries := list(entries):
            content = (entries_of(self._write_logprobs(each)["content"]) for each in pieces(entries))
            shown["logprobs"] = orjson.Fragment(array_of(content))
        return {**self._head, **shown, "done": bool(end), **end}

    def _end(self) -> dict[str, Any]:
        last = self._last
        assert last is not None
        queue, prefill, decode = (int(seconds * 1e9) for seconds in self._durations())
        is_whole = last.finish_reason is FinishReason.STOP and not self._parser.cut_calls
        return {
            "done_reason": "stop" if is_whole else "length",
            "total_duration": queue + prefill + decode,
            "load_duration": queue,
            "prompt_eval_count": last.num_prompt_tokens,
            "prompt_eval_duration": prefill,
            "eval_count": last.num_output_tokens,
            "eval_duration": decode,
        }


class LinesWriter(_OllamaWriter):
    """Writes the lines of a stream."""

    def feed_output(self, output: RequestOutput) -> bytes:
        found, entries = self._read(output), output.logprobs or []
        if entries and not found:
            found = [{"content": ""}]
        lines = (self._answer(piece, () if number else entries) for number, piece in enumerate(found))
        return b"".join(map(json_line, lines))

    def finish_stream(self) -> bytes:
        return json_line(self._answer({}, **self._end()))

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput] = ()) -> bytes:
        return error_line(error)


class ObjectWriter(_OllamaWriter):
    """Writes the whole answer as one object."""

    def __init__(self, request: OllamaRequest, answer: AnswerContext) -> None:
        super().__init__(request, answer)
        self._parts: defaultdict[str, list[Any]] = defaultdict(list)  # texts, or lists of calls
        self._entries: list[TokenLogprobs] = []

    def feed_output(self, output: RequestOutput) -> None:
        for name, part in chain.from_iterable(piece.items() for piece in self._read(output)):
            self._parts[name].append(part)
        self._entries += output.logprobs or ()

    def body(self) -> bytes:
        whole: Piece = {
            name: list(chain.from_iterable(parts)) if name == "tool_calls" else "".join(parts)
            for name, parts in self._parts.items()
        }
        return orjson.dumps(self._answer(whole, self._entries, **self._end()))


def load_body(request: OllamaRequest, model: str, now: float, reason: str) -> bytes:
    """Return the answer to a request that only loads or unloads the model."""
    shown = {"message": {"role": "assistant", "content": ""}} if request.asks_in == "messages" else {"response": ""}
    return orjson.dumps({"model": model, "created_at": timestamp(now), **shown, "done": True, "done_reason": reason})


class VectorsWriter(PrefillWriter[EmbedRequest]):
    """Writes the vectors of /api/embed, or the one of /api/embeddings."""

    def body(self) -> bytes:
        queue, prefill, decode = (int(seconds * 1e9) for seconds in self._answer.durations())
        return vectors_body(
            self._request,
            self._answer.head.model,
            self._in_order(),
            total_duration=queue + prefill + decode,
            load_duration=queue,
            prompt_eval_count=self._meter.usage().prompt_tokens,
        )


def vectors_body(request: EmbedRequest, model: str, raw: Sequence[bytes] = (), **counts: int) -> bytes:
    """Return the answer with these pooled hidden states; none for a request that only loads the model."""
    if isinstance(request, PromptEmbedRequest):
        body: dict[str, Any] = {"embedding": finished_vector(raw[0], None, normalize=False) if raw else []}
    else:
        vectors = [finished_vector(each, request.dimensions, normalize=True) for each in raw]
        body = {"model": model, "embeddings": vectors, **counts}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
