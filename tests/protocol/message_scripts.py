"""Answers as the parts of their messages, for the wire formats that are made of parts."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from engine.messages import FinishReason, RequestOutput
from protocol.answers import AnswerContext
from protocol.syntax.message_parts import (
    ContentDelta,
    MessageFormat,
    MessageParser,
    MessagePart,
    ReasoningDelta,
    TokenBytes,
    ToolCallArguments,
    ToolCallStart,
)
from tests.protocol.wire_helpers import answer, output, texts, token_bytes


class ScriptedParser(MessageParser):
    """A parser that finds in the n-th output what the script says."""

    def __init__(self, script: Sequence[Sequence[MessagePart]]) -> None:
        super().__init__(MessageFormat(), token_bytes)
        self._script = list(script)
        self._arguments: dict[int, str] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        return 3

    def read(self, output: RequestOutput) -> list[MessagePart]:
        parts = list(self._script.pop(0))
        self.num_tool_calls += sum(isinstance(part, ToolCallStart) for part in parts)
        for part in parts:
            if isinstance(part, ToolCallArguments):
                self._arguments[part.index] = self._arguments.get(part.index, "") + part.fragment
        return parts

    @property
    def cut_calls(self) -> Set[int]:
        return {index for index in range(self.num_tool_calls) if not self._arguments.get(index, "").endswith("}")}


@dataclass(frozen=True, kw_only=True)
class _ScriptedFormat(MessageFormat):
    script: Sequence[Sequence[MessagePart]]

    def parser(self, token_bytes: TokenBytes) -> MessageParser:
        return ScriptedParser(self.script)


def scripted(script: Sequence[Sequence[MessagePart]], **fields: Any) -> AnswerContext:
    """The context of an answer that is read as the script says."""
    return answer(message_format=_ScriptedFormat(script=script), **fields)


@st.composite
def scripts(draw: st.DrawFn) -> list[list[MessagePart]]:
    """Any legal parts of a message, cut into steps in any way: a call's arguments follow its start."""
    parts: list[MessagePart] = []
    calls = 0
    text = texts.filter(bool)
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind == "call":
            parts.append(ToolCallStart(calls, f"call_{calls}", draw(st.sampled_from(["look", "find"]))))
            arguments = draw(st.sampled_from(['{"a": {"b": ["ü", 1.5]}}', "{}", "", '{"cut": "o']))
            cut = draw(st.integers(0, len(arguments)))
            parts += [ToolCallArguments(calls, part) for part in (arguments[:cut], arguments[cut:]) if part]
            calls += 1
        else:
            delta = ReasoningDelta if kind == "reasoning" else ContentDelta
            parts += [delta(piece) for piece in draw(st.lists(text, min_size=1, max_size=3))]
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=3)))
    return [parts[start:end] for start, end in zip([0, *cuts], [*cuts, len(parts)], strict=True)]


def outputs_for(
    script: Sequence[Sequence[MessagePart]], finish: FinishReason = FinishReason.STOP, stop_reason: str | None = None
) -> list[RequestOutput]:
    """An output for each step of a script; the last one ends the choice."""
    outputs = [output("x", num_output_tokens=2 * step, num_cached_tokens=4) for step in range(1, len(script) + 1)]
    outputs[-1].finish_reason, outputs[-1].stop_reason = finish, stop_reason
    return outputs
