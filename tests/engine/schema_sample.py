"""A sample of JSON Schemas as programs send them: some written by pydantic for the types of two SDKs, some made up.

Run it (`python -m tests.engine.schema_sample`) to count what is enforced and what is refused.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pydantic

from engine.detokenizer import Vocabulary
from engine.errors import InvalidRequest
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from protocol.syntax.grammars import json_schema
from tests.engine.helpers import byte_level_tokenizer

LONGEST_WALK = 2000
EOS = 258


def sdk_schemas(package: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema of every model class of an SDK, by its name."""
    root = importlib.import_module(package)
    for module in sorted(pkgutil.walk_packages(root.__path__, f"{package}."), key=lambda each: each.name):
        for name, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, pydantic.BaseModel) and member.__module__ == module.name:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        yield f"{module.name}.{name}", pydantic.TypeAdapter(member).json_schema()
                    except pydantic.PydanticUserError:  # files, and other things that are no JSON
                        continue


def made_up_schemas(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What APIs describe: nested objects, references, bounds, formats, nullable fields, now and then a rare word."""
    for number in range(count):
        yield f"made up {number}", _Maker(random.Random(number)).document()


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.names = iter(f"{word}_{i}" for i in range(1000) for word in ("id", "name", "status", "total", "tags"))

    def document(self) -> dict[str, Any]:
        shared = {"Money": self.of_object(1), "Label": self.of_string()}
        self.shared = [f"#/$defs/{name}" for name in shared]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": shared, **self.of_object(3)}

    def of_any(self, depth: int) -> dict[str, Any]:
        simple = [self.of_string, self.of_number, lambda: {"type": "boolean"}, self.of_enum]
        if depth == 0 or self.chance.random() < 0.5:
            return self.chance.choice(simple)()
        nested = [self.of_object, self.of_array, self.of_union, self.of_reference]
        return self.chance.choice(nested)(depth - 1)

    def of_object(self, depth: int) -> dict[str, Any]:
        names = [next(self.names) for _ in range(self.chance.randint(1, 5))]
        schema: dict[str, Any] = {
            "type": "object",
            "title": "Something",
            "properties": {name: {"description": "What it is.", **self.of_any(depth)} for name in names},
            "required": [name for name in names if self.chance.random() < 0.6],
        }
        if self.chance.random() < 0.6:
            schema["additionalProperties"] = False
        if self.chance.random() < 0.03:
            schema["dependentRequired"] = {names[0]: [names[-1]]}
        return schema

    def of_array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.of_any(depth)}
        if self.chance.random() < 0.5:
            schema |= {"minItems": self.chance.randint(0, 2), "maxItems": self.chance.randint(2, 5)}
        if self.chance.random() < 0.1:
            schema["uniqueItems"] = self.chance.random() < 0.5
        return schema

    def of_union(self, depth: int) -> dict[str, Any]:
        if self.chance.random() < 0.5:
            return {"anyOf": [self.of_any(depth), {"type": "null"}], "default": None}
        kinds = [{**self.of_object(depth), "required": ["kind"]} for _ in range(2)]
        for number, kind in enumerate(kinds):
            kind["properties"]["kind"] = {"const": f"kind-{number}"}
        return {"oneOf": kinds, "discriminator": {"propertyName": "kind"}}

    def of_reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": self.chance.choice(self.shared)} if hasattr(self, "shared") else self.of_string()

    def of_string(self) -> dict[str, Any]:
        return {"type": "string"} | self.chance.choice(
            [
                {},
                {"format": self.chance.choice(["date-time", "uuid", "email", "uri", "date", "byte", "password"])},
                {"minLength": 1, "maxLength": self.chance.randint(2, 40)},
                {
                    "pattern": self.chance.choice(
                        [r"^[A-Z]{2}-\d{4}$", r"^\S+$", "^#[0-9a-f]{6}$", "^v[0-9]+", "(?!x)y"]
                    )
                },
            ]
        )

    def of_number(self) -> dict[str, Any]:
        return self.chance.choice(
            [
                {"type": "integer", "format": "int64"},
                {"type": "integer", "minimum": 0, "exclusiveMaximum": 100},
                {"type": "number", "format": "double", "maximum": 1e6},
                {"type": ["number", "null"]},
                {"type": "integer", "multipleOf": 5},
            ]
        )

    def of_enum(self) -> dict[str, Any]:
        return {"enum": self.chance.sample(["active", "closed", "é", 'a "b"', 3, None, True], 3)}


class Judge:
    """Compiles a schema and walks through its masks at random; what comes out has to fit."""

    def __init__(self) -> None:
        tokenizer = byte_level_tokenizer()
        self.vocabulary = Vocabulary(tokenizer)
        self.vocab_size = tokenizer.get_vocab_size()
        self.compiler = GrammarCompiler(self.vocabulary, vocab_size=self.vocab_size, eos_token_ids=(EOS,))
        # A random walk hardly ever ends: it opens as much as it closes, and goes on within strings.
        self.ends = [tokenizer.token_to_id(character) for character in '"}]']

    def refusal(self, schema: dict[str, Any]) -> str | None:
        """Why the schema is refused; None if something was written that fits. Raises if what was written does not."""
        try:
            grammar = self.compiler.compile(json_schema(schema))
        except InvalidRequest as error:
            return str(error)
        text = self.walk(grammar, json.dumps(schema))
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        return None

    def walk(self, grammar: CompiledGrammar, seed: str, longest: int = LONGEST_WALK) -> str:
        """What a model that picks its tokens at random would write."""
        matcher = grammar.matcher()
        chance = random.Random(seed)
        mask = np.zeros(-(-self.vocab_size // 32), dtype=np.uint32)
        token_ids: list[int] = []
        while not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            ends = [token_id for token_id in self.ends if token_id in allowed]
            restless = chance.random() < 0.3 and len(token_ids) < longest // 4
            token_id = chance.choice(allowed) if restless or not ends else ends[0]
            assert matcher.consume_token(token_id), matcher.get_error()
            token_ids.append(token_id)
            assert len(token_ids) < longest, "no end"
        assert not matcher.is_error(), "too complex to follow"
        return b"".join(self.vocabulary.token_bytes(token_id) for token_id in token_ids if token_id != EOS).decode()


def sample() -> list[tuple[str, dict[str, Any]]]:
    """The whole sample, always the same for the same versions of the SDKs: every twentieth of their classes."""
    classes = [*sdk_schemas("openai.types"), *sdk_schemas("anthropic.types")]
    return [*classes[::20], *made_up_schemas(200)]


def main() -> None:
    judge, outcomes = Judge(), Counter[str]()
    for name, schema in sample():
        try:
            refusal = judge.refusal(schema)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:300])
            refusal = "WRONG"
        outcomes[refusal or "enforced"] += 1
    for outcome, count in outcomes.most_common():
        print(f"{count:5} {outcome[:150]}")


if __name__ == "__main__":
    main()
