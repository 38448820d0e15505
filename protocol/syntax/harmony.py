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
    FREE_INPUT = enum.auto()  # of a custom tool, not as JSON


class HarmonyReader:
    """A `ToolReader` of the whole text of one choice.

    A header that is none, and a message to a function that does not begin with an object, is text. A call is announced
    with the first character of its arguments; where they stop being JSON it stays cut, and the rest is text.
    """

    def __init__(self, reading: Reading) -> None:
        stand_in = reading.tags.stand_in
        self._reading = reading
        self._sink = CallSink(reading.new_call_id)
        self._start, self._channel, self._message = stand_in(START), stand_in(CHANNEL), stand_in(MESSAGE)
        self._ends = (*map(stand_in, (END, CALL, RETURN)), self._start, self._channel)
        word = r"[^\s<\ud800-\udfff]+"
        self._header = re.compile(
            rf"\s*(?:assistant)?\s*(?:to=({word}))?\s*(?:{re.escape(self._channel)}\s*(analysis|commentary|final))?"
            rf"\s*(?:to=({word}))?\s*(?:{re.escape(stand_in(CONSTRAIN))})?\s*[a-z]*\s*"
        )
        self._body = _Body.CONTENT
        self._held = ""
        self._raw = ""  # the header of a call that has not begun
        self._name = ""
        self._scanner = JsonScanner()
        self._is_reasoning = False  # the channel is analysis
        self._has_content = False  # of another message
        _, begun, header = reading.prompt_end.rpartition(START)
        if begun:
            self._body = _Body.HEADER
            self.feed_text(stand_in(header))

    def feed_text(self, text: str) -> list[MessagePart]:
        self._held += text
        while self._held and self._step():
            pass
        return self._take()

    def finish_text(self) -> list[MessagePart]:
        held, self._held = self._held, ""
        match self._body:
            case _Body.HEADER:
                self._give_back(held)
            case _Body.CALL:
                self._end()
            case _Body.BETWEEN:
                pass
            case _:
                self._read(held)
                self._end()
        return self._take()

    @property
    def cut_calls(self) -> Set[int]:
        return self._sink.cut_calls

    def _step(self) -> bool:
        """Read what is held. Return True if more can be read."""
        if self._body is _Body.HEADER:
            return self._in_header()
        if self._body is _Body.BETWEEN:
            self._held = self._held.lstrip()
            if not self._held.startswith((self._start, self._channel)):
                if unfinished_tag(self._held, self._ends) == len(self._held):
                    return False
                self._body = _Body.CONTENT  # no header follows
                return True
            self._held = self._held.removeprefix(self._start)
            self._body = _Body.HEADER
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
        if self._held.startswith(self._start):  # the prompt has not begun the message
            self._held = self._held.removeprefix(self._start)
        found = find_tag(self._held, (self._message, *self._ends[:4]))
        header = self._held if found is None else self._held[: found[0]]
        if found is None and self._may_be_header(header):
            return False
        if found is None or found[1] != self._message:
            self._held = self._held[len(header) :]
            self._give_back(header)
            return True
        self._held = self._held[len(header) + len(self._message) :]
        self._begin(header)
        return True

    def _may_be_header(self, text: str) -> bool:
        length = len(text)
        text = text[: length - unfinished_tag(text, (self._message, *self._ends))]
        before, channel, _ = text.partition(self._channel)
        start = before.strip().removeprefix("assistant").strip()
        is_begun = not channel and any(each.startswith(start) for each in ("to=", "assistant"))
        return length <= _MAX_HEADER and (is_begun or not start or (start.startswith("to=") and " " not in start))

    def _begin(self, header: str) -> None:
        """Begin the body of the message with this header."""
        match = self._header.fullmatch(header)
        if match is None:
            self._give_back(header)
            return
        first, channel, second = match.groups()
        recipient = first or second
        self._is_reasoning = channel == "analysis"
        if recipient is None:
            self._body = {"analysis": _Body.REASONING, "commentary": _Body.PREAMBLE}.get(channel, _Body.CONTENT)
            return
        self._name = recipient.removeprefix(_FUNCTIONS)
        is_call = recipient.startswith(_FUNCTIONS) or self._name in self._reading.functions
        if self._reading.tools is None or not is_call or not self._name:
            self._give_back(header)
            return
        self._body, self._raw, self._scanner = _Body.CALL, header, JsonScanner()

    def _give_back(self, text: str) -> None:
        """Read as text what is no header of ours, or what has not become a call."""
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
                raw, self._raw = self._raw + text, ""
                self._give_back(raw)
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
                if self._has_content:
                    text, self._has_content = f"\n\n{text}", False
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

    def _end(self) -> None:
        """End the message that is being read."""
        if self._body is _Body.CALL:  # without arguments
            self._sink.start(self._name)
            self._sink.arguments("{}")
            self._sink.end_arguments()
        elif self._body is _Body.FREE_INPUT:
            self._sink.end_arguments()
        self._sink.end()
        self._has_content |= self._body in (_Body.CONTENT, _Body.PREAMBLE)
        self._is_reasoning = False

    def _take(self) -> list[MessagePart]:
        parts, self._sink.parts = self._sink.parts, []
        return parts


# -------------------------------------------------------------------------------------------------------------- history


def _shape(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation that the template of gpt-oss shows completely.

    It knows one developer message, at the beginning, and the thoughts of a message with a call, which it drops if an
    answer without calls follows. The text of a message with a call is a preamble, after the thoughts.
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
