"""The fields that ask for structured output, and their one grammar.

They are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, and the single fields of
SGLang (`regex`, `ebnf`, `json_schema`) and llama.cpp (`grammar`, `json_schema`). A request may use one of them; clients
that send vLLM's new and old fields together get the new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from msgspec import structs
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import StructuredOutput, StructuredOutputKind
from protocol.body import ClientModel, OneOf, RequestBody, at_most, fail_fast
from protocol.syntax import grammars

MAX_CHOICES = 4096
MAX_TAGS = 128

# Phrases in llguidance's errors about valid schemas with unsupported keywords.
BEYOND_GRAMMARS = re.compile("Unimplemented|not supported|only supported|Unknown format|disjoint|registry")
LEAVES_OUT = "keywords that no grammar enforces are left out, and the header x-headrace-warning names them."
_OF_SCHEMAS = (StructuredOutputKind.JSON_SCHEMA, StructuredOutputKind.STRUCTURAL_TAG)


def _from_json(value: Any) -> Any:
    """Decode a schema that a client sent as a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise PydanticCustomError(
            "rule", f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None


Schema = Annotated[dict[str, Any] | bool, OneOf("a JSON Schema: an object, true or false"), BeforeValidator(_from_json)]
Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], fail_fast, at_most(MAX_CHOICES, "choices"), Field(min_length=1)]


class NamedSchema(ClientModel):
    """A named schema. Without `strict`, keywords that no grammar enforces are left out, with a warning.

    Without `schema` the answer is any JSON object.
    """

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool = False


class TextFormat(ClientModel):
    type: Literal["text"]


class JsonObjectFormat(ClientModel):
    """Any JSON object, or, as in llama.cpp, one that fits a schema."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")


class JsonSchemaFormat(ClientModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structure(ClientModel):
    """JSON between two pieces of text."""

    begin: Text
    schema_: Schema = Field(default=True, alias="schema")
    end: str = ""


class StructuralTagFormat(ClientModel):
    """Free text in which every trigger is followed by one of the structures that begin with it."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"format": ()}  # xgrammar's newer form

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], fail_fast, at_most(MAX_TAGS, "structures"), Field(min_length=1)]
    triggers: Annotated[list[Text], fail_fast, at_most(MAX_TAGS, "triggers"), Field(min_length=1)]

    @model_validator(mode="after")
    def _structures_are_triggered(self) -> Self:
        for number, structure in enumerate(self.structures):
            if not any(structure.begin.startswith(trigger) for trigger in self.triggers):
                raise PydanticCustomError(
                    "rule", "must begin with one of the triggers", {"field": f"structures.{number}.begin"}
                )
        return self

    def grammar(self) -> StructuredOutput:
        tags = [grammars.Tag(entry.begin, entry.schema_, entry.end) for entry in self.structures]
        return grammars.tagged_json(tags, triggers=self.triggers)


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, OneOf()]


class StructuredOutputs(ClientModel):
    """vLLM's object: exactly one of the first six fields, and the layout of JSON."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Annotated[StructuralTagFormat, BeforeValidator(_from_json)] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Text | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._asked) != 1:
            raise PydanticCustomError(
                "rule", "must have exactly one of json, regex, choice, grammar, json_object and structural_tag"
            )
        return self

    @property
    def _asked(self) -> dict[str, Any]:
        asked = {name: getattr(self, name) for name in ("regex", "choice", "grammar", "structural_tag")}
        asked |= {"json": self.json_, "json_object": self.json_object or None}
        return {name: value for name, value in asked.items() if value is not None}

    def to_structured_output(self) -> StructuredOutput:
        ((kind, value),) = self._asked.items()
        return structs.replace(
            _MAKERS[kind](value),
            any_whitespace=not self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern,
            closed=self.disable_additional_properties,
        )


def _of(kind: StructuredOutputKind, value: str) -> StructuredOutput:
    return StructuredOutput(kind=kind, value=value)


_MAKERS: Mapping[str, Callable[[Any], StructuredOutput]] = {
    "json": grammars.json_schema,
    "choice": grammars.choice,
    "structural_tag": StructuralTagFormat.grammar,
    "json_object": lambda asked: _of(StructuredOutputKind.JSON_OBJECT, ""),
    "regex": partial(_of, StructuredOutputKind.REGEX),
    "grammar": partial(_of, StructuredOutputKind.GRAMMAR),
}
_FIELDS = {
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    "guided_choice": "choice",
    "guided_json_object": "json_object",
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), "grammar"),
}
_OLDER = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")


class StructuredOutputFields(RequestBody):
    """The fields of a generation request that ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_json_object: bool = False
    guided_whitespace_pattern: Text | None = None
    grammar: Text | None = None  # llama.cpp's
    json_schema: Schema | None = None  # llama.cpp's and SGLang's
    regex: Text | None = None  # SGLang's
    ebnf: Text | None = None  # SGLang's

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        names = list(self.grammars_asked_for)
        if len(names) > 1:
            raise InvalidRequest(
                f"{names[1]} cannot be combined with {names[0]}: an answer follows one grammar.", param=names[1]
            )
        if self.guided_whitespace_pattern is not None and not names:
            raise InvalidRequest(
                "guided_whitespace_pattern needs a schema, as in guided_json; send one or leave it out.",
                param="guided_whitespace_pattern",
            )
        return self

    def structured_output(self) -> tuple[str, StructuredOutput | None]:
        """Return the field that asks for a grammar, and the grammar."""
        for name, grammar in self.grammars_asked_for.items():
            return name, grammar
        return "response_format", None

    def advice_on(self, refusal: str) -> str:
        """Return advice about a strict schema that cannot be fully enforced."""
        name, grammar = self.structured_output()
        if grammar is None or grammar.lenient or grammar.kind not in _OF_SCHEMAS or not BEYOND_GRAMMARS.search(refusal):
            return ""
        where = "Without strict" if name == "response_format" else "In response_format without strict"
        return f" {where}, {LEAVES_OUT}"

    @property
    def without_effect(self) -> tuple[str, ...]:
        older = () if self.structured_outputs is None else _OLDER
        return super().without_effect + tuple(name for name in older if getattr(self, name) not in (None, False))

    @cached_property
    def grammars_asked_for(self) -> dict[str, StructuredOutput]:
        """The grammars by the fields that ask for them; at most one in a checked request."""
        found = self._grammars()
        return found if self.structured_outputs is None else {k: v for k, v in found.items() if k not in _OLDER}

    def _grammars(self) -> dict[str, StructuredOutput]:
        found: dict[str, StructuredOutput] = {}
        match self.response_format:
            case JsonSchemaFormat(json_schema=NamedSchema(schema_=None)) | JsonObjectFormat(schema_=None):
                found["response_format"] = _of(StructuredOutputKind.JSON_OBJECT, "")
            case JsonSchemaFormat(json_schema=NamedSchema(schema_=schema, strict=strict)) if schema is not None:
                found["response_format"] = grammars.json_schema(schema, lenient=not strict)
            case JsonObjectFormat(schema_=schema) if schema is not None:
                found["response_format"] = grammars.json_schema(schema, lenient=True)
            case StructuralTagFormat() as tags:
                found["response_format"] = tags.grammar()
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.to_structured_output()
        for name, kind in _FIELDS.items():
            if (value := getattr(self, name)) is not None and (value or kind != "json_object"):
                found[name] = _MAKERS[kind](value)
        if self.guided_whitespace_pattern is not None:
            pattern = self.guided_whitespace_pattern
            return {name: structs.replace(grammar, whitespace_pattern=pattern) for name, grammar in found.items()}
        return found
