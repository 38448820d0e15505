"""The families' syntaxes for tool calls, and which of them a chat template was made for."""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from engine.messages import StructuredOutput
from protocol.syntax import hermes, llama3, mistral
from protocol.syntax.call_reader import CustomInputs, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag, tagged_json
from protocol.syntax.message_parts import ContentDelta, MessagePart, ReasoningDelta, ToolReader
from protocol.syntax.reasoning import SpecialTags
from protocol.tools.kinds import ANY_OBJECT, INPUT, CustomTool, Function, ToolUse


class _NewReader(Protocol):
    def __call__(self, new_call_id: NewCallId, names: Container[str], tags: SpecialTags) -> ToolReader: ...


_MISTRAL_ID = 9  # characters


def _new_openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolFormat:
    """How one family writes calls.

    `tags` are what its reader has to see in the text, special tokens or not. `opening` is where a grammar may take
    over from free text, None if that cannot be told from an answer. `known_call_id` makes an id that the family's
    templates take of any other; None if they take all.
    """

    tags: tuple[str, ...]
    new_reader: _NewReader
    tag: Callable[[str, JsonSchema], Tag]
    opening: str | None
    separator: str
    new_call_id: NewCallId = _new_openai_id
    known_call_id: Callable[[str], str] | None = None

    def reader(self, tools: ToolUse, tags: SpecialTags) -> Callable[[], ToolReader]:
        """Return a function that makes the reader of one choice of such a request."""
        names = frozenset(function.name for function in tools.functions)
        custom = frozenset(function.name for function in tools.functions if isinstance(function, CustomTool))
        family_reader = partial(self.new_reader, self.new_call_id, names, tags)

        def new_reader() -> ToolReader:
            reader = CustomInputs(family_reader(), custom) if custom else family_reader()
            return reader if tools.parallel else _FirstCallOnly(reader)

        return new_reader

    def grammar(self, tools: ToolUse) -> StructuredOutput | None:
        """What makes the model call as the request demands; None if that leaves it free.

        Where no call is required, arguments are held to their schema all the same if a function is strict.
        """
        if tools.choice == "required":
            tags = [self._tag(function) for function in tools.callable_functions]
            repeat = tools.parallel and tools.named is None
            return _for_programs(tagged_json(tags, text=False, required=True, repeat=repeat, separator=self.separator))
        if self.opening is None or not any(function.strict for function in tools.functions):
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


def _new_mistral_id() -> str:
    # The family's templates refuse a conversation with ids of another form.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID))


def _known_mistral_id(call_id: str) -> str:
    if len(call_id) == _MISTRAL_ID and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID]


FORMATS = {
    "hermes": ToolFormat(hermes.TAGS, hermes.new_reader, hermes.tag, hermes.OPENING, separator="\n"),
    "llama3": ToolFormat(llama3.TAGS, llama3.new_reader, llama3.tag, None, separator="; "),
    "mistral": ToolFormat(
        *(mistral.TAGS, mistral.new_reader, mistral.tag, mistral.OPENING),
        separator="",
        new_call_id=_new_mistral_id,
        known_call_id=_known_mistral_id,
    ),
}


END_TOKENS = (
    *(*hermes.END_TOKENS, *llama3.END_TOKENS, *mistral.END_TOKENS),
    *("<|call|>", "<|observation|>", "<|tool_response>"),  # of gpt-oss, GLM and Gemma, whose calls no reader here knows
)
"""The tokens that end a turn or a call of a model family, in vocabularies that have them as special tokens."""


def format_of_template(source: str) -> ToolFormat | None:
    """The syntax that a chat template teaches; None if it is none of ours."""
    if mistral.OPENING in source:
        return FORMATS["mistral"]
    # Qwen 3 Coder uses the same tags around something else.
    if hermes.OPENING in source and "<function=" not in source:
        return FORMATS["hermes"]
    if llama3.OPENING in source or ("ipython" in source and '"parameters"' in source):
        return FORMATS["llama3"]
    return None


class _FirstCallOnly:
    """A reader of which only the first call is kept, for clients that cannot handle more."""

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
