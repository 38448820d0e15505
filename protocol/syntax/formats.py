"""The families' syntaxes for tool calls, and which of them a chat template was made for."""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from engine.messages import StructuredOutput
from protocol.syntax.call_reader import BlockReader, CustomInputs, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag, tagged_json
from protocol.syntax.json_calls import ARGUMENTS, CALL_ID, CallList, CallObject
from protocol.syntax.message_parts import ContentDelta, MessagePart, ReasoningDelta, ToolReader
from protocol.syntax.reasoning import SpecialTags
from protocol.tools.kinds import ANY_OBJECT, INPUT, CustomTool, Function, ToolUse

_MISTRAL_ID = 9  # characters


def _new_openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_mistral_id() -> str:
    # The family's templates refuse a conversation with ids of another form.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID))


def _known_mistral_id(call_id: str) -> str:
    if len(call_id) == _MISTRAL_ID and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The way in which one family writes calls.

    `opening` and `closing` are around a block of calls, `other_tags` are in it. With `bare` a block may also begin by
    this character, without `opening`: that looks like an answer in JSON, so it must name a function that was offered.
    `separator` is between two blocks. A grammar writes a call as `before`, an object with its arguments under the key
    `arguments`, and `after`. `known_call_id` makes an id that the family's templates accept of any other; None if they
    accept all.
    """

    opening: str
    closing: str | None = None
    other_tags: tuple[str, ...] = ()
    end_tokens: tuple[str, ...]
    bare: str | None = None
    separator: str
    before: str
    arguments: str = "arguments"
    after: str
    lists_calls: bool = False  # as Mistral does
    new_call_id: NewCallId = _new_openai_id
    known_call_id: Callable[[str], str] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that must be in the text, even if they are special tokens."""
        return (self.opening, *filter(None, [self.closing]), *self.other_tags)

    def tag(self, name: str, schema: JsonSchema) -> Tag:
        """Return a call as a grammar writes it."""
        before = f'{self.before}{{"name": {json.dumps(name)}, "{self.arguments}": '
        return Tag(before, schema, f"}}{self.after}")

    def block_reader(self, new_call_id: NewCallId, names: Container[str], tags: SpecialTags) -> ToolReader:
        """Return a reader of one choice of a request that offers functions of these names."""
        return BlockReader(
            partial(CallList, tags) if self.lists_calls else partial(CallObject, names=names if self.bare else None),
            new_call_id,
            opening=tags.stand_in(self.opening),
            closing=self.closing and tags.stand_in(self.closing),
            bare=self.bare,
            separators=self.separator.strip(),
        )

    def reader(self, tools: ToolUse, tags: SpecialTags) -> Callable[[], ToolReader]:
        """Return a function that makes the reader of one choice of such a request."""
        names = frozenset(function.name for function in tools.functions)
        custom = frozenset(function.name for function in tools.functions if isinstance(function, CustomTool))

        def new_reader() -> ToolReader:
            reader = self.block_reader(self.new_call_id, names, tags)
            reader = CustomInputs(reader, custom) if custom else reader
            return reader if tools.parallel else _FirstCallOnly(reader)

        return new_reader

    def grammar(self, tools: ToolUse) -> StructuredOutput | None:
        """Return the grammar that makes the model call as the request demands; None if that leaves it free.

        Where no call is required, arguments still have to fit their schema if a function is strict.
        """
        if tools.choice == "required":
            tags = [self._tag(function) for function in tools.callable_functions]
            repeat = tools.parallel and tools.named is None
            return _for_programs(tagged_json(tags, text=False, required=True, repeat=repeat, separator=self.separator))
        if self.bare is not None or not any(function.strict for function in tools.functions):
            return None
        tags = [self._tag(function, is_free=True) for function in tools.functions]
        return _for_programs(tagged_json(tags, triggers=[self.opening]))

    def _tag(self, function: Function, *, is_free: bool = False) -> Tag:
        if not isinstance(function, CustomTool):
            if is_free and not function.strict:
                return self.tag(function.name, ANY_OBJECT)
            return self.tag(function.name, _of_object(function.schema))._replace(lenient=not function.strict)
        tag = self.tag(function.name, function.schema)
        if function.syntax != "regex":  # a Lark grammar is only shown to the model
            return tag
        return Tag(f'{tag.begin}{{"{INPUT}": "', True, f'"}}{tag.end}', regex=function.definition)


def _of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    # Arguments are an object, also where a schema does not say so.
    return schema if "type" in schema else {"type": "object", **schema}


def _for_programs(grammar: StructuredOutput) -> StructuredOutput:
    # Line breaks and indents only cost tokens, and a function fails on an argument that it does not know.
    return structs.replace(grammar, any_whitespace=False, closed=True)


FORMATS = {
    "hermes": ToolFormat(  # which Qwen and many others share
        opening="<tool_call>",
        closing="</tool_call>",
        end_tokens=("<|im_end|>",),
        separator="\n",
        before="<tool_call>\n",
        after="\n</tool_call>",
    ),
    "llama3": ToolFormat(
        opening="<|python_tag|>",
        end_tokens=("<|eot_id|>", "<|eom_id|>"),
        bare="{",
        separator="; ",
        before="",
        arguments="parameters",
        after="",
    ),
    "mistral": ToolFormat(
        opening="[TOOL_CALLS]",
        other_tags=(CALL_ID, ARGUMENTS),
        end_tokens=("</s>",),
        separator="",
        before="[TOOL_CALLS][",  # the old form, which all versions of the family read
        after="]",
        lists_calls=True,
        new_call_id=_new_mistral_id,
        known_call_id=_known_mistral_id,
    ),
}

END_TOKENS = (
    *(token for each in FORMATS.values() for token in each.end_tokens),
    *("<|call|>", "<|observation|>", "<|tool_response>"),  # of gpt-oss, GLM and Gemma: no reader here knows their calls
)
"""The tokens that end a turn or a call of a model family, in vocabularies that have them as special tokens."""


def format_of_template(source: str) -> ToolFormat | None:
    """Return the syntax that a chat template teaches; None if it is none of ours."""
    if FORMATS["mistral"].opening in source:
        return FORMATS["mistral"]
    # Qwen 3 Coder uses the same tags around something else.
    if FORMATS["hermes"].opening in source and "<function=" not in source:
        return FORMATS["hermes"]
    if FORMATS["llama3"].opening in source or ("ipython" in source and '"parameters"' in source):
        return FORMATS["llama3"]
    return None


class _FirstCallOnly:
    """A reader that drops all calls but the first, for clients that cannot handle more."""

    def __init__(self, reader: ToolReader) -> None:
        self._reader = reader

    def feed_text(self, text: str) -> list[MessagePart]:
        return self._kept(self._reader.feed_text(text))

    def finish_text(self) -> list[MessagePart]:
        return self._kept(self._reader.finish_text())

    @property
    def cut_calls(self) -> Set[int]:
        return self._reader.cut_calls & {0}

    def _kept(self, parts: Iterable[MessagePart]) -> list[MessagePart]:
        return [part for part in parts if isinstance(part, ContentDelta | ReasoningDelta) or part.index == 0]
