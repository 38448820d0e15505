"""The response object and its events.

One writer serves streams and whole answers: it builds the response item by item from the parts of the message
(`protocol.syntax.message_parts`) and makes the events on the way. So a stream and a whole answer have the same items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from engine.messages import FinishReason, RequestOutput
from protocol.answers import Head, event_frame, raise_if_failed
from protocol.errors import ApiError
from protocol.openai.logprobs import ChatLogprobs, array_of, entries_of
from protocol.responses.items import item_id, message_item, reasoning_item
from protocol.responses.tools import CallForm
from protocol.syntax import message_parts
from protocol.tools.kinds import KINDS

_TEXT_DELTA = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":%d,"item_id":%b,"output_index":%d,'
    b'"content_index":0,"delta":%b,"logprobs":[%b]}\n\n'
)

CANCELLED = "response_cancelled"
"""The code of the error that ends a request when a cancel request stops it."""

Done = Callable[[dict[str, Any]], None]
"""A callback that gets the ended response before the client does."""


_FUNCTION = CallForm(KINDS["function"], "")


@dataclass(slots=True)
class _OpenItem:
    kind: type[message_parts.MessagePart]  # the kind of parts in it
    id: str
    index: int
    number: int | None = None  # the index of a call among the calls
    call_id: str = ""  # only of a call
    form: CallForm = _FUNCTION
    phase: str | None = None  # only of a message
    text: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # JSON of one or more entries: see `protocol.openai.logprobs`

    def as_item(self, status: str) -> dict[str, Any]:
        text = "".join(self.text)
        if self.kind is message_parts.ContentDelta:
            logprobs = orjson.Fragment(array_of(self.logprobs)) if self.logprobs else None
            return message_item(self.id, text, status, logprobs, self.phase)
        if self.kind is message_parts.ReasoningDelta:
            return reasoning_item(self.id, [text], status)
        return self.form.item(self.id, self.call_id, text, status)


class ResponseStreamWriter:
    """Writes the response to one request. `read_with` is called first.

    `echo` has the request's fields in the response, `call_forms` the forms of calls by the model's names. `done` is
    called when the response has ended, also if it failed.
    """

    def __init__(
        self,
        head: Head,
        echo: Mapping[str, Any],
        *,
        call_forms: Mapping[str, CallForm] | None = None,
        write_logprobs: ChatLogprobs | None = None,
        done: Done = lambda response: None,
    ) -> None:
        self._head = head
        self._parser: message_parts.MessageParser | None = None
        self._echo = echo
        self._call_forms = call_forms or {}
        self._write_logprobs = write_logprobs
        self._done = done
        self._output: list[dict[str, Any]] = []  # the items that are complete
        self._open: _OpenItem | None = None
        self._last: RequestOutput | None = None
        self._events = 0
        self._is_queued = False
        self._logprobs: list[Any] = []  # entries of tokens without text so far
        self._skipped = 0  # log-probabilities of reasoning, which are not shown

    def read_with(self, parser: message_parts.MessageParser) -> Self:
        """Set the parser, which depends on the end of the prompt. Return this writer."""
        self._parser = parser
        return self

    def queue(self) -> bytes:
        """Return the first events of a background response, before there is anything to read."""
        self._is_queued = True
        queued = self.response("queued")
        return self._event("response.created", response=queued) + self._event("response.queued", response=queued)

    def feed_output(self, output: RequestOutput) -> bytes:
        raise_if_failed(output)
        assert self._parser is not None
        frames = self._begin() if self._last is None else []
        self._last = output
        if self._write_logprobs is not None and output.logprobs:
            self._logprobs += self._write_logprobs(output.logprobs)["content"]
        for part in self._parser.read(output):
            frames += self._part(part)
        return b"".join(frames)

    def finish_stream(self) -> bytes:
        frames, response = self._finish_response()
        return b"".join([*frames, self._event(f"response.{response['status']}", response=response)])

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput] = ()) -> bytes:
        frames = self._begin() if self._last is None else []
        for output in unsent:
            self._last = output
        if self._open is not None:
            self._output.append(self._open.as_item("incomplete"))
            self._open = None
        if error.code == CANCELLED:
            # The API has no event for a cancelled response: it is incomplete with status `cancelled`.
            name, response = "response.incomplete", self.response("cancelled")
        else:
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            name, response = "response.failed", self.response("failed", error={"code": code, "message": error.message})
        self._done(response)
        return b"".join([*frames, self._event(name, response=response)])

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the response object as it is now, with every key. Threads may call it at any time."""
        item = self._open  # read before `_output`: a closing item joins `_output` before `_open` is cleared
        output = list(self._output)
        if item is not None and item.index == len(output):
            output.append(item.as_item("in_progress"))
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": output,
            "usage": None if self._last is None or status in ("queued", "in_progress") else self._usage(self._last),
            **self._echo,
            **fields,
        }

    def _finish_response(self) -> tuple[list[bytes], dict[str, Any]]:
        assert self._last is not None
        is_whole = self._last.finish_reason is FinishReason.STOP and not self._cut_calls
        frames = []
        if self._open is None and not self._output:  # an empty answer is an empty message
            frames += self._begin_item(self._new_item(message_parts.ContentDelta, "msg"))
        frames += self._close("completed" if is_whole else "incomplete")
        if is_whole:
            response = self.response("completed", completed_at=int(time.time()))
        else:  # the API has no reason for an abort by the operator or an end within a call
            response = self.response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        self._done(response)
        return frames, response

    @property
    def _cut_calls(self) -> Set[int]:
        return self._parser.cut_calls if self._parser else frozenset()

    @property
    def _num_reasoning_tokens(self) -> int:
        return (self._parser.num_reasoning_tokens or 0) if self._parser else 0

    # --- items

    def _part(self, part: message_parts.MessagePart) -> list[bytes]:
        match part:
            case message_parts.ContentDelta(text, is_preamble):
                phase = "commentary" if is_preamble else None
                frames = self._begin_unless_open(message_parts.ContentDelta, "msg", phase)
                if frames and self._output and self._output[-1].get("phase"):
                    text = text.removeprefix("\n\n")  # the separator of an answer's messages in other dialects
                return [*frames, self._text_delta(text)]
            case message_parts.ReasoningDelta(text):
                frames = self._begin_unless_open(message_parts.ReasoningDelta, "rs")
                frames.append(self._delta("response.reasoning_text.delta", text, content_index=0))
                return frames
            case message_parts.ToolCallStart(number, call_id, name, is_custom):
                form = self._call_forms.get(name) or CallForm(KINDS["custom" if is_custom else "function"], name)
                frames = self._close("completed")
                item = self._new_item(
                    message_parts.ToolCallArguments, form.kind.id_prefix, number=number, call_id=call_id, form=form
                )
                return frames + self._begin_item(item)
            case message_parts.ToolCallArguments(_, fragment) | message_parts.ToolCallInput(_, fragment):
                assert self._open is not None
                if (event := self._open.form.kind.event) is not None:
                    return [self._delta(f"{event}.delta", fragment)]
                self._open.text.append(fragment)
                return []

    def _begin_unless_open(
        self, kind: type[message_parts.MessagePart], prefix: str, phase: str | None = None
    ) -> list[bytes]:
        if self._open is not None and self._open.kind is kind and self._open.phase == phase:
            return []
        return self._close("completed") + self._begin_item(self._new_item(kind, prefix, phase=phase))

    def _new_item(self, kind: type[message_parts.MessagePart], prefix: str, **fields: Any) -> _OpenItem:
        index = len(self._output)
        return _OpenItem(kind, item_id(prefix, self._head.id, index), index, **fields)

    def _begin_item(self, item: _OpenItem) -> list[bytes]:
        self._open = item
        empty = item.as_item("in_progress")
        parts = empty.pop("content", None)
        if parts is None:
            return [self._event("response.output_item.added", output_index=item.index, item=empty)]
        added = self._event("response.output_item.added", output_index=item.index, item={**empty, "content": []})
        return [added, self._item_event("response.content_part.added", item, content_index=0, part=parts[0])]

    def _close(self, status: str) -> list[bytes]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        if item.number is not None:
            status = "incomplete" if item.number in self._cut_calls else "completed"
        if item.kind is message_parts.ContentDelta and self._logprobs:  # of tokens without text, such as the last
            item.logprobs.append(entries_of(self._take_logprobs()))
        text = "".join(item.text)
        whole = item.as_item(status)
        self._output.append(whole)
        self._open = None
        if item.kind is message_parts.ToolCallArguments:
            events = item.form.done_events(whole)
            frames = [self._event(name, **{"output_index": item.index, **fields}) for name, fields in events]
        else:
            part = whole["content"][0]
            if item.kind is message_parts.ContentDelta:
                fields = {"text": text, "logprobs": part["logprobs"]}
                frames = [self._item_event("response.output_text.done", item, content_index=0, **fields)]
            else:
                frames = [self._item_event("response.reasoning_text.done", item, content_index=0, text=text)]
            frames.append(self._item_event("response.content_part.done", item, content_index=0, part=part))
        return [*frames, self._event("response.output_item.done", output_index=item.index, item=whole)]

    def _text_delta(self, text: str) -> bytes:
        item = self._open
        assert item is not None
        item.text.append(text)
        logprobs = b""
        if self._logprobs:
            logprobs = entries_of(self._take_logprobs())
            item.logprobs.append(logprobs)
        self._events += 1
        return _TEXT_DELTA % (self._events - 1, orjson.dumps(item.id), item.index, orjson.dumps(text), logprobs)

    def _delta(self, name: str, text: str, **fields: Any) -> bytes:
        assert self._open is not None
        self._open.text.append(text)
        return self._item_event(name, self._open, delta=text, **fields)

    def _take_logprobs(self) -> list[Any]:
        # The reasoning's entries come first, all before the answer begins.
        hidden = min(len(self._logprobs), self._num_reasoning_tokens - self._skipped)
        self._skipped += hidden
        taken, self._logprobs = self._logprobs[hidden:], []
        return taken

    # --- events

    def _begin(self) -> list[bytes]:
        names = ["response.created", "response.in_progress"][self._is_queued :]
        return [self._event(name, response=self.response("in_progress")) for name in names]

    def _item_event(self, event_type: str, item: _OpenItem, /, **fields: Any) -> bytes:
        return self._event(event_type, item_id=item.id, output_index=item.index, **fields)

    def _event(self, event_type: str, /, **fields: Any) -> bytes:
        self._events += 1
        return event_frame(event_type, {"type": event_type, "sequence_number": self._events - 1, **fields})

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "input_tokens": output.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
        }


class ResponseBodyWriter(ResponseStreamWriter):
    """Writes the response as one JSON body, for requests without `stream`. It drops the stream's events."""

    def body(self) -> bytes:
        return orjson.dumps(self._finish_response()[1])
