"""Answers of chat and completions: chunks, messages and usage.

`WireFormat` has their differences. `ChoicesStreamWriter` is on the path of every token: without logprobs and running
usage, a chunk costs one `orjson.dumps` of its text between two byte strings that are made once per choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from engine.messages import FinishReason, RequestOutput, TokenLogprobs
from protocol.answers import DONE, Answer, AnswerContext, data_frame, encode, raise_if_failed
from protocol.errors import ApiError
from protocol.openai.answers import AssistantMessage, CompletionTokensDetails, PromptTokensDetails, Usage
from protocol.openai.logprobs import LogprobsWriter, joined, pieces, written
from protocol.syntax import message_parts

if TYPE_CHECKING:
    from protocol.openai.generation import GenerationRequest


FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
"""The API's finish reasons of answers. `abort`, by the operator, is vLLM's."""


_NOTHING: Mapping[str, Any] = {}


class UsageMeter:
    """Token counts of one HTTP request: each prompt once, the completions of all choices.

    There are `n` choices per prompt; those of several prompts are numbered one prompt after the other. `prompt_tokens`
    are the prompts' lengths, for a request that fails before its first output.
    """

    def __init__(self, n: int, prompt_tokens: Sequence[int] = ()) -> None:
        self._n = n
        self._prompt = dict(enumerate(prompt_tokens))
        self._cached: dict[int, int] = {}
        self._completion: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}

    def add(self, output: RequestOutput) -> None:
        """Replace the choice's totals by those of `output`."""
        if output.index not in self._completion:
            prompt = output.index // self._n
            self._prompt[prompt] = output.num_prompt_tokens
            # Later choices of a prompt hit the blocks of the first one; only its own hits were cached before.
            self._cached[prompt] = min(output.num_cached_tokens, self._cached.get(prompt, output.num_cached_tokens))
        self._completion[output.index] = output.num_output_tokens

    def add_reasoning(self, index: int, num_tokens: int | None) -> None:
        """Set the number of a choice's tokens that are reasoning so far; None if it is unknown."""
        if num_tokens is not None:
            self._reasoning[index] = num_tokens

    def usage(self) -> Usage:
        prompt, completion = sum(self._prompt.values()), sum(self._completion.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
            completion_tokens_details=(
                CompletionTokensDetails(sum(self._reasoning.values())) if self._reasoning else None
            ),
        )


class _ChoicesWriter:
    def __init__(self, request: GenerationRequest, answer: AnswerContext) -> None:
        self._wire = request.wire
        self._n = request.n
        self._answer = answer
        self._parts = request.prompt_parts(answer.prompts, answer.decode)
        self._has_token_ids = request.return_token_ids
        self._meter = UsageMeter(request.n, list(map(len, answer.prompts)))
        self._as_token_ids = request.return_tokens_as_token_ids
        self._in_old_form = request.answers_in_old_form
        self._tier: Mapping[str, Any] = _NOTHING if request.service_tier is None else {"service_tier": "default"}

    def _new_logprobs_writer(self, index: int) -> LogprobsWriter:
        echoes = self._parts is not None and self._parts.echo_logprobs is not None
        num_echoed = len(self._answer.prompts[index // self._n]) if echoes else 0
        return self._wire.logprobs(self._answer.token_bytes, self._as_token_ids, self._answer.hidden_ids, num_echoed)

    def _new_parser(self) -> message_parts.MessageParser | None:
        return None if self._answer.message_format.is_plain else self._answer.parser()

    def _of_prompt(self, index: int, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """Return the parts of a choice's prompt to repeat in the answer. `entries` begin with the second token."""
        parts = self._parts
        found: dict[str, Any] = {}
        if self._has_token_ids:
            found["prompt_token_ids"] = self._answer.prompts[index // self._n]
        if parts is not None and parts.prompt_logprobs is not None:
            shown = (parts.logprobs_of(piece, self._answer.token_bytes) for piece in pieces(entries or ()))
            found["prompt_logprobs"] = joined(chain([[None]], shown))
        return found

    def _finish_reason(self, reason: FinishReason, parser: message_parts.MessageParser | None) -> str:
        """Return the `finish_reason` of a choice. With calls it is `tool_calls`, unless the client named the call, and
        `length` if a call is incomplete, because clients run the calls of choices that end otherwise.
        """
        if reason is FinishReason.STOP and parser and parser.num_tool_calls:
            if parser.cut_calls:
                reason = FinishReason.LENGTH
            elif not parser.message_format.call_is_named:
                return "function_call" if self._in_old_form else "tool_calls"
        return FINISH_REASONS[reason]

    def _begin(self, output: RequestOutput) -> RequestOutput:
        """Return the first output of a choice, with the repeated parts of its prompt before it."""
        if self._parts is None:
            return output
        return self._parts.begin(output, output.index // self._n, self._answer.token_bytes)


class ChoicesStreamWriter(_ChoicesWriter):
    """Writes the event stream of one request.

    Each choice has an opening chunk with its first output, a chunk per output with text or logprobs, and one with the
    finish reason and no text. With a message format that is not plain, each part of the message is a chunk.
    """

    def __init__(self, request: GenerationRequest, answer: AnswerContext) -> None:
        super().__init__(request, answer)
        options = request.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self._choices: dict[int, _StreamedChoice] = {}
        self._is_plain = answer.message_format.is_plain and not (self._has_token_ids or self._continuous_usage)

    def feed_output(self, output: RequestOutput) -> bytes:
        index = output.index
        choice = self._choices.get(index)
        if choice is not None and self._is_plain and output.finish_reason is None and not output.logprobs:  # usual
            self._meter.add(output)
            return choice.frame(output.text) if output.text else b""
        frames = []
        of_prompt = _NOTHING  # for the first chunk of a choice
        if choice is None:
            choice = self._choices[index] = self._open(index)
            of_prompt = self._of_prompt(index, output.prompt_logprobs)
            if self._wire.opening is not None:  # comes before any token
                frames.append(self._frame(index, self._wire.opening, of_prompt=of_prompt))
                of_prompt = _NOTHING
            output = self._begin(output)
        self._meter.add(output)
        raise_if_failed(output)
        if choice.parser is not None:
            frames += self._message_parts(choice, choice.parser, output)
        elif output.logprobs or self._has_token_ids or of_prompt or (output.text and self._continuous_usage):
            logprobs = written(choice.write_logprobs, output.logprobs) if output.logprobs else None
            token_ids = output.token_ids if self._has_token_ids else None
            text = self._wire.chunk_text(output.text)
            frames.append(self._frame(index, text, logprobs, token_ids=token_ids, of_prompt=of_prompt))
        elif output.text:
            frames.append(choice.frame(output.text))
        if output.finish_reason is not None:
            finish_reason = self._finish_reason(output.finish_reason, choice.parser)
            finish = {"finish_reason": finish_reason, "stop_reason": output.stop_reason}
            frames.append(self._frame(index, self._wire.closing, finish=finish))
        return b"".join(frames)

    def finish_stream(self) -> bytes:
        """Return the usage chunk if the client asked for it, and `[DONE]`."""
        if not self._include_usage:
            return DONE
        return data_frame(encode(self._chunk([], self._meter.usage()))) + DONE

    def fail_stream(self, error: ApiError, unsent: Iterable[RequestOutput] = ()) -> bytes:
        """Return an error frame with the usage so far, `unsent` included, and `[DONE]`."""
        for output in unsent:
            self._meter.add(output)
        return data_frame(encode({**error.envelope(), "usage": self._meter.usage()})) + DONE

    def _message_parts(
        self, choice: _StreamedChoice, parser: message_parts.MessageParser, output: RequestOutput
    ) -> list[bytes]:
        """Return a frame for each part of the message in `output`, the first one with its logprobs and token ids."""
        parts = message_parts.join(parser.read(output))
        self._meter.add_reasoning(output.index, parser.num_reasoning_tokens)
        match parts:
            case [message_parts.ContentDelta(text)] if not (
                output.logprobs or self._has_token_ids or self._continuous_usage
            ):
                return [choice.frame(text)]
        deltas = [in_old_form(delta(part)) if self._in_old_form else delta(part) for part in parts]
        if not deltas and (output.logprobs or (self._has_token_ids and output.token_ids)):
            deltas = [{"content": ""}]
        logprobs = written(choice.write_logprobs, output.logprobs) if output.logprobs else None
        token_ids = output.token_ids if self._has_token_ids else None
        frames = []
        for each in deltas:
            frames.append(self._frame(output.index, {"delta": each}, logprobs, token_ids=token_ids))
            logprobs = token_ids = None
        return frames

    def _open(self, index: int) -> _StreamedChoice:
        # The place of the text is found in a real frame, so the fast path cannot differ from the other.
        hole = "\0"
        prefix, _, suffix = self._frame(index, self._wire.chunk_text(hole)).rpartition(orjson.dumps(hole))
        return _StreamedChoice(prefix, suffix, self._new_logprobs_writer(index), self._new_parser())

    def _frame(
        self,
        index: int,
        text: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        of_prompt: Mapping[str, Any] = _NOTHING,
    ) -> bytes:
        choice = {"index": index, **text, "logprobs": logprobs, **(finish or {"finish_reason": None})}
        usage = self._meter.usage() if self._continuous_usage else None
        chunk = self._chunk([choice], usage)
        if token_ids is not None:
            choice["token_ids"] = token_ids
        (choice if self._wire.prompt_in_choice else chunk).update(of_prompt)
        return data_frame(encode(chunk))

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        chunk = {
            "id": self._answer.head.id,
            "object": self._wire.chunk_object,
            "created": self._answer.head.created,
            "model": self._answer.head.model,
            "system_fingerprint": self._answer.fingerprint,
            "choices": choices,
            **self._tier,
        }
        # Without include_usage the key is absent: some clients take its presence for the last chunk.
        return {**chunk, "usage": usage} if self._include_usage else chunk


class ChoicesBodyWriter(_ChoicesWriter):
    def __init__(self, request: GenerationRequest, answer: AnswerContext) -> None:
        super().__init__(request, answer)
        self._choices: dict[int, _CollectedChoice] = {}

    def feed_output(self, output: RequestOutput) -> None:
        raise_if_failed(output)
        self._meter.add(output)
        choice = self._choices.get(output.index)
        if choice is None:
            choice = self._choices[output.index] = _CollectedChoice(self._new_parser())
            choice.prompt_logprobs = output.prompt_logprobs
            output = self._begin(output)
        if choice.parser is not None:
            choice.parts += choice.parser.read(output)
            self._meter.add_reasoning(output.index, choice.parser.num_reasoning_tokens)
        else:
            choice.text.append(output.text)
        choice.token_ids += output.token_ids
        if output.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = []
            choice.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            choice.finish_reason = self._finish_reason(output.finish_reason, choice.parser)
            choice.stop_reason = output.stop_reason

    def body(self) -> bytes:
        indices = sorted(self._choices)
        of_prompt: Mapping[str, Any] = _NOTHING
        if not self._wire.prompt_in_choice and indices:
            of_prompt = self._of_prompt(indices[0], self._choices[indices[0]].prompt_logprobs)
        body = self._wire.whole(
            id=self._answer.head.id,
            created=self._answer.head.created,
            model=self._answer.head.model,
            choices=[self._choice(index, self._choices[index]) for index in indices],
            usage=self._meter.usage(),
            system_fingerprint=self._answer.fingerprint,
            **self._tier,
            **of_prompt,
        )
        return encode(body)

    def _choice(self, index: int, choice: _CollectedChoice) -> Answer:
        if choice.parser is None:
            text = self._wire.full_text("".join(choice.text))
        else:
            fields = message_fields(choice.parts)
            text = {"message": AssistantMessage(**(in_old_form(fields) if self._in_old_form else fields))}
        return self._wire.choice(
            index=index,
            **text,
            logprobs=None if choice.logprobs is None else written(self._new_logprobs_writer(index), choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._has_token_ids else None,
            **(self._of_prompt(index, choice.prompt_logprobs) if self._wire.prompt_in_choice else _NOTHING),
        )


class _StreamedChoice(NamedTuple):
    prefix: bytes  # the part of a text frame before the text
    suffix: bytes
    write_logprobs: LogprobsWriter
    parser: message_parts.MessageParser | None  # None: the text is content

    def frame(self, text: str) -> bytes:
        return b"%b%b%b" % (self.prefix, orjson.dumps(text), self.suffix)


@dataclass(slots=True)
class _CollectedChoice:
    parser: message_parts.MessageParser | None
    parts: list[message_parts.MessagePart] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def delta(part: message_parts.MessagePart) -> dict[str, Any]:
    """Return `part` as the delta of a chunk: a call's id and name once, its arguments in pieces."""
    match part:
        case message_parts.ReasoningDelta(text):
            return {"reasoning": text, "reasoning_content": text}
        case message_parts.ContentDelta(text):
            return {"content": text}
        case message_parts.ToolCallStart(index):
            return {"tool_calls": [{"index": index, **_begun(part)}]}
        case message_parts.ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case message_parts.ToolCallInput(index, fragment):
            return {"tool_calls": [{"index": index, "custom": {"input": fragment}}]}


def in_old_form(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a delta or a message with its only call as `function_call`."""
    others = {name: value for name, value in fields.items() if name != "tool_calls"}
    return {**others, "function_call": fields["tool_calls"][0]["function"]} if "tool_calls" in fields else fields


def _begun(start: message_parts.ToolCallStart) -> dict[str, Any]:
    if start.is_custom:
        return {"id": start.call_id, "type": "custom", "custom": {"name": start.name, "input": ""}}
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}


def message_fields(parts: Iterable[message_parts.MessagePart]) -> dict[str, Any]:
    """Return the fields of a message of these parts. Content is null if there are only calls or reasoning."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in message_parts.join(parts):
        match part:
            case message_parts.ReasoningDelta(text):
                reasoning.append(text)
            case message_parts.ContentDelta(text):
                content.append(text)
            case message_parts.ToolCallStart():
                calls.append(_begun(part))
            case message_parts.ToolCallArguments(index, fragment):
                calls[index]["function"]["arguments"] += fragment
            case message_parts.ToolCallInput(index, fragment):
                calls[index]["custom"]["input"] += fragment
    thought = "".join(reasoning) if reasoning else None
    fields = {
        "content": "".join(content) if content or not (calls or reasoning) else None,
        "reasoning": thought,
        "reasoning_content": thought,
    }
    return {**fields, "tool_calls": calls} if calls else fields
