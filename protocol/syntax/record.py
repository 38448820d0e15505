"""The record of a syntax: how one family of models writes reasoning and tool calls.

A record is the only place that knows a family. `registry.py` lists the records and finds the one of a chat template;
`ModelSyntax` (`model_syntax.py`) applies the chosen one to requests. A new family is a `Syntax(...)` in the registry:

`matches`           from the template's source and the names of the special tokens: is this the family?
`opening`, `closing`, `other_tags`, `bare`, `separator`
                    the markers of a block of calls. Every marker in `tags` reaches the reader: as one character
                    (`Reading.tags.stand_in(marker)`) if it is a special token of the vocabulary, else as it is spelled
`block`             makes the `Block` (call_reader.py) that reads a block behind `opening`. For other text
                    than prose around blocks, override `new_reader` in a subclass instead (harmony.py)
`before`, `after`   the text around the JSON arguments of a call, with NAME for the function: what grammars enforce,
                    declarations teach and histories show. For arguments that are not JSON, override `tag`, `grammar`
                    and `write_call`
`end_tokens`, `inner_tokens`
                    tokens that end an answer, and tokens that do not although model files may say so
`new_call_id`, `known_call_id`
                    ids by the function's name and the call's number in the conversation; and the id for one that
                    may come from another model
`shape`             brings a conversation into the form of the family's templates. What a template shows of calls,
                    several calls, arguments as text and declarations is found out by rendering (history.py), so
                    a record does not say it
`declaration`       describes functions where the template does not
`reasoning`         tags of the reasoning, if the template's source does not show which
`after_reasoning`, `answer_opening`
                    text that a grammar puts between two messages of an answer, and before the content
`efforts`           for each value of `reasoning_effort` that the templates do not know, one that they do
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from msgspec import structs

from engine.messages import StructuredOutput
from protocol.chat_template import Markup, Written
from protocol.syntax.call_reader import Block, BlockReader, CallSink, CustomInputs, NewCallId
from protocol.syntax.grammars import JsonSchema, Tag, tagged_json
from protocol.syntax.message_parts import ContentDelta, MessagePart, ReasoningDelta, ToolReader
from protocol.syntax.reasoning import NO_SPECIAL_TAGS, ReasoningTags, SpecialTags
from protocol.tools.kinds import ANY_OBJECT, INPUT, CustomTool, Function, ToolUse

Message = dict[str, Any]
"""A message in the form of chat templates."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The facts that the readers of a request's choices need.

    `tools` is None if no calls are read. `new_call_id` takes the function's name and the call's index in the message.
    `prompt_end` is the end of the prompt. Without `splits_reasoning` the reasoning is content.
    """

    tools: ToolUse | None
    new_call_id: NewCallId
    tags: SpecialTags = NO_SPECIAL_TAGS
    prompt_end: str = ""
    splits_reasoning: bool = True

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions that the request offers, by their names."""
        return {function.name: function for function in self.tools.functions} if self.tools else {}

    @cached_property
    def custom_names(self) -> Set[str]:
        return {name for name, function in self.functions.items() if isinstance(function, CustomTool)}


def new_openai_id(name: str, number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """The syntax of one family; the module's docstring explains the fields.

    With `bare` a block may also begin with this character, without `opening`. Since an answer in JSON looks the same,
    such a block must name a function that was offered. `separator` is between two blocks.
    """

    name: str
    matches: Callable[[str, Container[str]], bool]
    opening: str = ""
    closing: str | None = None
    other_tags: tuple[str, ...] = ()
    bare: str | None = None
    separator: str = ""
    block: Callable[[Reading, CallSink], Block] | None = None
    before: str = ""
    after: str = ""
    holds_strict: bool = True  # a grammar holds free calls of strict functions to their schemas
    end_tokens: tuple[str, ...] = ()
    inner_tokens: tuple[str, ...] = ()
    new_call_id: Callable[[str, int], str] = new_openai_id
    known_call_id: Callable[[str, str, int], str] | None = None  # takes id, name and number
    shape: Callable[[Sequence[Message]], list[Message]] = list
    reasoning: ReasoningTags | None = None
    after_reasoning: str = ""
    answer_opening: str = ""
    efforts: Mapping[str, str] = field(default_factory=dict)

    reads_reasoning = False  # True: `new_reader` reads the whole message, even if no tools are offered

    @property
    def tags(self) -> tuple[str, ...]:
        """The markers that must be in the text even if they are special tokens."""
        return (*filter(None, [self.opening, self.closing]), *self.other_tags)

    def begins_message(self, prompt_end: str) -> bool:
        """Return True if a prompt with this end begins a new answer, maybe with reasoning, and continues none."""
        return True

    # --- reading

    def new_reader(self, reading: Reading) -> ToolReader:
        """Return a reader of one choice."""
        assert self.block is not None
        return BlockReader(
            partial(self.block, reading),
            reading.new_call_id,
            opening=reading.tags.stand_in(self.opening),
            closing=self.closing and reading.tags.stand_in(self.closing),
            bare=self.bare,
            separators=self.separator.strip(),
        )

    def reader(self, reading: Reading) -> Callable[[], ToolReader]:
        """Return a function that makes the reader of one choice, with the free text of custom tools."""

        def new_reader() -> ToolReader:
            reader = self.new_reader(reading)
            if reading.custom_names:
                reader = CustomInputs(reader, reading.custom_names)
            return reader if reading.tools is None or reading.tools.parallel else _FirstCallOnly(reader)

        return new_reader

    # --- writing

    def tag(self, name: str, schema: JsonSchema) -> Tag:
        """Return a call as a grammar writes it."""
        return Tag(self.before.replace("NAME", json.dumps(name)[1:-1]), schema, self.after)

    def grammar(self, tools: ToolUse) -> StructuredOutput | None:
        """Return the grammar for the calls that the request demands; None if the request leaves the model free.

        Where no call is required, arguments still have to fit their schema if a function is strict.
        """
        if tools.choice == "required":
            tags = [self.function_tag(function) for function in tools.callable_functions]
            repeat = tools.parallel and tools.named is None
            return for_programs(tagged_json(tags, text=False, required=True, repeat=repeat, separator=self.separator))
        if not self.holds_strict or self.bare is not None or not any(function.strict for function in tools.functions):
            return None
        tags = [self.function_tag(function, is_free=True) for function in tools.functions]
        return for_programs(tagged_json(tags, triggers=[self.opening]))

    def function_tag(self, function: Function, *, is_free: bool = False) -> Tag:
        """Return a call of this function as a grammar writes it; if `is_free`, only strict functions are enforced."""
        if not isinstance(function, CustomTool):
            if is_free and not function.strict:
                return self.tag(function.name, ANY_OBJECT)
            return self.tag(function.name, _of_object(function.schema))._replace(lenient=not function.strict)
        tag = self.tag(function.name, function.schema)
        if function.syntax != "regex":  # a Lark grammar is only shown to the model
            return tag
        return Tag(f'{tag.begin}{{"{INPUT}": "', True, f'"}}{tag.end}', regex=function.definition)

    def write_call(self, name: str, arguments: str | Mapping[str, Any]) -> Written:
        """Return a call of an earlier turn as the model would have written it, for templates that show none."""
        start, _, rest = self.before.partition("NAME")
        return Written(Markup(start), json.dumps(name)[1:-1], Markup(rest), json_of(arguments), Markup(self.after))

    def write_result(self, result: str) -> Written:
        """Return a call's result as the text of a user's message, for templates without results."""
        return Written(Markup("<tool_response>\n"), result, Markup("\n</tool_response>"))

    def declaration(self, functions: Sequence[Function]) -> Written:
        """Return the description of the functions and of calls, for templates that declare no tools."""
        listed = "\n".join(json.dumps(each.for_template()["function"], ensure_ascii=False) for each in functions)
        return Written(
            "You can call functions to help the user. These are the functions, with the JSON Schemas of their "
            f"parameters:\n\n{listed}\n\n"
            "To call one, answer with its name and its arguments as a JSON object, exactly like this:\n\n",
            Markup(f"{self.before}{{ARGUMENTS}}{self.after}"),
            "\n\nThe result comes with the next message. If no function is needed, just answer.",
        )


def json_of(arguments: str | Mapping[str, Any]) -> str:
    """Return a call's arguments as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def for_programs(grammar: StructuredOutput) -> StructuredOutput:
    """Return the grammar without white space in JSON, which only costs tokens, and without undeclared properties, on
    which functions fail."""
    return structs.replace(grammar, any_whitespace=False, closed=True)


def _of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    # Arguments are an object, also where a schema does not say so.
    return schema if "type" in schema else {"type": "object", **schema}


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
