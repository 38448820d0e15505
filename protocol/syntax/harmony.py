"""Harmony, the syntax of gpt-oss: an answer is several messages, each with a channel.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>

Analysis is reasoning, final is content, commentary is a preamble. A message to a function is a call in any channel; the
recipient may also stand before the channel. The prompt ends with ``<|start|>assistant``, and a call ends the turn.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from engine.messages import StructuredOutput
from protocol.chat_template import Markup, Written
from protocol.syntax.call_reader import CallSink
from protocol.syntax.grammars import JsonSchema, Tag, tagged_json
from protocol.syntax.history import content_text
from protocol.syntax.json_scanner import JsonScanner
from protocol.syntax.message_parts import ContentDelta, MessagePart, ReasoningDelta, ToolReader
from protocol.syntax.reasoning import ReasoningTags, find_tag, unfinished_tag
from protocol.syntax.record import Message, Reading, Syntax, for_programs
from protocol.tools.kinds import ToolUse

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_ASSISTANT = f"{START}assistant"
_ANALYSIS = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", END)
_FINAL = f"{CHANNEL}final{MESSAGE}"
_PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
_ROLE = "assistant"
_FUNCTIONS = "functions."
_MAX_HEADER = 256  # characters


class _Body(enum.Enum):
    """The part of an answer that is being read."""

    HEADER = enum.auto()
    BETWEEN = enum.auto()  # after a message
    REASONING = enum.auto()
    CONTENT = enum.auto()
    PREAMBLE = enum.auto()
    CALL = enum.auto()  # its arguments have not begun
    ARGUMENTS = enum.auto()
    AFTER_ARGUMENTS = enum.auto()
    FREE_INPUT = enum.auto()  # input of a custom tool, not as JSON


class HarmonyReader:
    """A `ToolReader` of the whole text of one choice.

    A malformed header, and a message to a function that does not begin with an object, are text. A call is announced
    with the first character of its arguments; if they stop being JSON, the call stays incomplete and the rest is text.
    """

    def __init__(self, reading: Reading) -> None:
        stand_in = reading.tags.stand_in
        self._reading = reading
        self._sink = CallSink(reading.new_call_id)
        self._start, self._channel, self._message = stand_in(START), stand_in(CHANNEL), stand_in(MESSAGE)
        self._ends = (*map(stand_in, (END, CALL, RETURN)), self._start, self._channel)
        word = r"[^\s<\ud800-\udfff]+"
        self._header = re.compile(
            rf"\s*(?:to=({word}))?\s*(?:{re.escape(self._channel)}\s*(analysis|commentary|final))?"
            rf"\s*(?:to=({word}))?\s*(?:{re.escape(stand_in(CONSTRAIN))})?\s*[a-z]*\s*"
        )
        self._body = _Body.CONTENT
        self._held = ""
        self._raw = ""  # the header of a call that has not begun
        self._name = ""
        self._scanner = JsonScanner()
        self._is_reasoning = False  # the channel is analysis
        self._has_content = False
        self._is_new = False  # a message has ended since the last content
        self._awaits_role = False  # after ``<|start|>``
        _, begun, header = reading.prompt_end.rpartition(START)
        if begun:
            self._body = _Body.HEADER
            self.feed_text(stand_in(begun + header))
            self._has_content = False

    def feed_text(self, text: str) -> list[MessagePart]:
        self._held += text
        while self._held and self._step():
            pass
        return self._take()

    def finish_text(self) -> list[MessagePart]:
        if self._body is _Body.HEADER:
            self._give_back(self._held)
        elif self._body is not _Body.BETWEEN:
            held, self._held = self._held, ""
            self._read(held)
            self._end(is_complete=False)
        return self._take()

    @property
    def cut_calls(self) -> Set[int]:
        return self._sink.cut_calls

    def _step(self) -> bool:
        """Read the held text. Return True if more can be read."""
        if self._body is _Body.HEADER:
            return self._in_header()
        if self._body is _Body.BETWEEN:
            self._held = self._held.lstrip()
            if unfinished_tag(self._held, self._ends) == len(self._held):
                return False
            has_header = self._held.startswith((self._start, self._channel))
            self._body = _Body.HEADER if has_header else _Body.CONTENT
            return True
        found = find_tag(self._held, self._ends)
        if found is None:
            rest = len(self._held) - unfinished_tag(self._held, self._ends)
            text, self._held = self._held[:rest], self._held[rest:]
            self._read(text)
            return False
        position, tag = found
        self._read(self._held[:position])
        self._held = self._held[position + (0 if tag in (self._start, self._channel) else len(tag)) :]
        self._end()
        self._body = _Body.BETWEEN
        return True

    # --- headers

    def _in_header(self) -> bool:
        if self._held.startswith(self._start):
            self._held, self._awaits_role = self._held.removeprefix(self._start), True
        if self._awaits_role:
            if len(self._held) < len(_ROLE) and _ROLE.startswith(self._held):
                return False
            self._held, self._awaits_role = self._held.removeprefix(_ROLE), False
        found = find_tag(self._held, (self._message, *self._ends[:-1]))
        unfinished = unfinished_tag(self._held, (self._message, *self._ends)) if found is None else 0
        header = self._held[: len(self._held) - unfinished if found is None else found[0]]
        before, channel, _ = header.partition(self._channel)
        if not ("to=".startswith(before.strip()) or before.lstrip().startswith("to=")):
            self._body = _Body.CONTENT
        elif len(header) > _MAX_HEADER:
            self._give_back(before + channel)
        elif found is None:
            return False
        elif found[1] != self._message:
            self._give_back(header)
        else:
            self._held = self._held[len(header) + len(self._message) :]
            self._begin(header)
        return True

    def _begin(self, header: str) -> None:
        """Begin the body of the message with this header."""
        match = self._header.fullmatch(header)
        first, channel, second = match.groups() if match else (None, None, None)
        recipient = first or second
        self._is_reasoning = channel == "analysis"
        if match is None or (recipient is None and channel is None and header.strip()):
            self._read_as_text(header)
            return
        if recipient is None:
            self._body = {"analysis": _Body.REASONING, "commentary": _Body.PREAMBLE}.get(channel or "", _Body.CONTENT)
            return
        self._name = recipient.removeprefix(_FUNCTIONS)
        is_call = recipient.startswith(_FUNCTIONS) or self._name in self._reading.functions
        if self._reading.tools is None or not is_call or not self._name:
            self._read_as_text(header)
            return
        self._body, self._raw, self._scanner = _Body.CALL, header, JsonScanner()

    def _give_back(self, start: str) -> None:
        """Read the start of the held text, which is not a valid header, as text."""
        self._held = self._held[len(start) :]
        self._read_as_text(start)

    def _read_as_text(self, text: str) -> None:
        self._body = _Body.REASONING if self._is_reasoning else _Body.CONTENT
        self._read(text)

    # --- bodies

    def _read(self, text: str) -> None:
        """Read text of the body."""
        if not text:
            return
        if self._body is _Body.CALL:
            start = text.lstrip()
            if start and start[0] != "{" and self._name not in self._reading.custom_names:
                self._read_as_text(self._raw + text)
                return
            if not start:
                self._raw += text
                return
            self._sink.start(self._name)
            self._body, text = (_Body.ARGUMENTS if start[0] == "{" else _Body.FREE_INPUT), start
        if self._body is _Body.AFTER_ARGUMENTS:
            text = text.lstrip()
            self._body = _Body.CONTENT if text else self._body
        match self._body:
            case _Body.AFTER_ARGUMENTS:
                pass
            case _Body.FREE_INPUT:
                self._sink.arguments(text)
            case _Body.ARGUMENTS:
                self._read_arguments(text)
            case _Body.REASONING if self._reading.splits_reasoning:
                self._sink.parts.append(ReasoningDelta(text))
            case _:
                if self._has_content and self._is_new:
                    text = f"\n\n{text}"
                self._has_content, self._is_new = True, False
                self._sink.parts.append(ContentDelta(text, self._body is _Body.PREAMBLE))

    def _read_arguments(self, text: str) -> None:
        end = self._scanner.scan(text)
        self._sink.arguments(text[:end])
        if not (self._scanner.is_done or self._scanner.is_broken):
            return
        self._body = _Body.CONTENT
        if self._scanner.is_done:
            self._sink.end_arguments()
            self._body = _Body.AFTER_ARGUMENTS
        self._sink.end()
        self._read(text[end:])

    def _end(self, *, is_complete: bool = True) -> None:
        """End the message that is being read. A call without arguments is valid only if the message is complete."""
        if self._body is _Body.CALL:
            self._sink.start(self._name)
            if is_complete:
                self._sink.arguments("{}")
                self._sink.end_arguments()
        elif self._body is _Body.FREE_INPUT:
            self._sink.end_arguments()
        self._sink.end()
        self._is_new, self._is_reasoning = True, False

    def _take(self) -> list[MessagePart]:
        parts, self._sink.parts = self._sink.parts, []
        return parts


# -------------------------------------------------------------------------------------------------------------- history


def _shape(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation that the template of gpt-oss shows completely.

    The template shows one developer message, at the beginning. It shows the reasoning of a message with a call only if
    no answer without calls follows. The text of such a message is put after the reasoning, as a preamble.
    """
    answers = [place for place, each in enumerate(messages) if _is_assistant(each) and not each.get("tool_calls")]
    shaped: list[Message] = []
    for place, message in enumerate(messages):
        thought, text = message.get("reasoning", ""), content_text(message["content"])
        if message["role"] in ("system", "developer"):
            if len(shaped) == 1 and shaped[0]["role"] == "developer":
                text = f"{shaped.pop()['content']}\n\n{text}"
            shaped.append({**message, "role": "user" if shaped else "developer", "content": text})
        elif not (_is_assistant(message) and message.get("tool_calls") and text):
            shaped.append({**message, "thinking": thought} if thought else message)
        elif answers and place < answers[-1]:
            shaped += [{"role": "assistant", "content": text}, {**message, "content": ""}]
        else:
            thought = Written(thought, Markup(f"{END}{_ASSISTANT}{_PREAMBLE}"), text)
            shaped.append({**message, "content": "", "thinking": thought})
    return shaped


def _is_assistant(message: Message) -> bool:
    return bool(message["role"] == "assistant")


# --------------------------------------------------------------------------------------------------------------- record


@dataclass(frozen=True, kw_only=True)
class _Harmony(Syntax):
    reads_reasoning = True

    def new_reader(self, reading: Reading) -> ToolReader:
        return HarmonyReader(reading)

    def begins_message(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(_ASSISTANT)

    def tag(self, name: str, schema: JsonSchema) -> Tag:
        return super().tag(name, schema)._replace(end="")  # the engine's end token ends the call

    def grammar(self, tools: ToolUse) -> StructuredOutput | None:
        is_required = tools.choice == "required"
        if not is_required and not any(function.strict for function in tools.functions):
            return None
        calls = [self.function_tag(each, is_free=not is_required) for each in tools.callable_functions]
        if is_required:
            return for_programs(tagged_json(calls, text=False, required=True, repeat=False))
        others = [Tag(begin, None, f"{END}{_ASSISTANT}") for begin in (_ANALYSIS.opening, _PREAMBLE)]
        return for_programs(tagged_json([*others, Tag(_FINAL, None, ""), *calls], text=False, required=True))


HARMONY = _Harmony(
    name="harmony",
    matches=lambda template, special_tokens: CHANNEL in template and MESSAGE in template,
    other_tags=(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN),
    before=f"{CHANNEL}commentary to={_FUNCTIONS}NAME {CONSTRAIN}json{MESSAGE}",
    after=CALL,
    end_tokens=(RETURN, CALL),
    inner_tokens=(END,),
    shape=_shape,
    reasoning=_ANALYSIS,
    after_reasoning=_ASSISTANT,
    answer_opening=_FINAL,
    efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
)
