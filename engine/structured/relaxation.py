"""What of a JSON Schema is left when a grammar cannot enforce all of it.

A relaxed schema takes every value that the whole one takes, and more: keywords are left out, never added, and a `oneOf`
becomes an `anyOf`. Whoever asked is told by JSON pointers what was left out, and checks it when the answer is there.

1. What the compiler has no grammar for goes first: its keywords, formats and references to other documents.
2. If that is not enough, more goes, from keyword groups that the compiler takes in part to everything but the outermost
   shape. What need not have gone is put back, as far as a few more tries show it.
3. The compiler is asked a bounded number of times, and once it has taken long, only for the outermost shape.

Schemas are `json_schema.prepared` before they come here, and pointers are into that form.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin

import jsonschema_rs
import msgspec
from llguidance import LLMatcher

from engine.structured.json_schema import STANDARD_FORMATS, replace_one_of, replace_subschemas
from engine.structured.pointers import joined, resolved

ENOUGH_SECONDS = 0.5  # of processor time, after which only the outermost shape is tried
REFINING_SECONDS = 0.2  # of processor time, in which what need not have gone is put back
MAX_TRIES = 16  # of the compiler, to put it back
MAX_PATTERNS = 64  # tried one by one
OPEN_DEPTH = 3  # levels that are kept at most of a schema that is too large or too deep

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_ENFORCED_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
_NO_GRAMMAR = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
    )
)
_IN_PART = frozenset(("minProperties", "maxProperties", "patternProperties", "multipleOf"))
_BOUNDS = frozenset(
    (
        *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_COMBINING = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
_GROUPS = (_IN_PART, _BOUNDS, _COMBINING)

Fits = Callable[[Any], bool]
"""Whether the compiler takes a schema."""


class Relaxed(msgspec.Struct, frozen=True):
    """A schema that can be enforced, and what it leaves out."""

    schema: Any
    left_out: tuple[str, ...]


def invalid(schema: Any) -> str | None:
    """What is wrong with a schema by the schema of schemas, in words; None if nothing is."""
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        place = joined("", *error.instance_path)
        why = error.message[:200]
        if error.instance_path[-1:] == ["type"]:
            why = f"{str(error.instance)[:40]!r} is none of {', '.join(TYPES)}"
        return f"it is no valid JSON Schema at {place[:200] or 'its root'}: {why}."
    except ValueError as error:
        return f"it is no valid JSON Schema: {str(error)[:200]}."
    return None


def relax(schema: Any, fits: Fits, *, seconds: float = ENOUGH_SECONDS) -> Relaxed | None:
    """The schema with as little left out as was found to be enough; None if not even its outermost shape fits."""
    began = time.thread_time()
    try:
        found = _by_groups(schema, fits, began + seconds)
    except RecursionError:
        found = None
    if found is None:
        shallow = outermost(schema)
        found = Relaxed(shallow, ("",)) if fits(shallow) else None
    return found


def least(schema: Any) -> Relaxed:
    """The schema without the words that no grammar can hold. Nobody is asked whether that is enough."""
    try:
        return _Cut(schema, frozenset(), frozenset()).relaxed
    except RecursionError:
        return Relaxed(outermost(schema), ("",))


def outermost(schema: Any) -> dict[str, Any]:
    """Return a schema of nothing but the value's type, which `allOf` or a reference may name."""
    return _typed(schema, None if _ids(schema) else schema)


def _typed(schema: Any, root: Any) -> dict[str, Any]:
    asked = _type_of(schema, root)
    return {} if asked is None else {"type": asked}


def _type_of(schema: Any, root: Any, depth: int = 8) -> Any:
    """Return the value's `type`, None if there is none. References lead into the document `root`, if it is given."""
    if not isinstance(schema, dict) or depth == 0:
        return None
    if "type" in schema:
        return schema["type"]
    parts = schema.get("allOf")
    parts = list(parts) if isinstance(parts, list) else []
    if isinstance(reference := schema.get("$ref"), str) and root is not None:
        parts.append(resolved(root, reference))
    return next((asked for part in parts if (asked := _type_of(part, root, depth - 1)) is not None), None)


def _by_groups(schema: Any, fits: Fits, end: float) -> Relaxed | None:
    first = _Cut(schema, frozenset(), frozenset())
    if fits(first.schema):
        return first.relaxed
    groups: frozenset[str] = frozenset()
    for group in _GROUPS:
        if time.thread_time() > end:
            return None
        groups |= group
        cut = _Cut(schema, groups, frozenset())
        if fits(cut.schema):
            return _put_back(schema, groups, cut, sorted(set(cut.pointers) - set(first.pointers)), fits)
    for depth in range(OPEN_DEPTH, 0, -1):
        if time.thread_time() > end:
            return None
        shallow = _Cut(schema, groups, frozenset(), depth=depth)
        if fits(shallow.schema):
            return shallow.relaxed
    return None


def _put_back(schema: Any, groups: frozenset[str], cut: _Cut, candidates: list[str], fits: Fits) -> Relaxed:
    """Put back what can stand, half of the candidates at a time."""
    end = time.thread_time() + REFINING_SECONDS
    spared: frozenset[str] = frozenset()
    halves = [candidates]
    for _ in range(MAX_TRIES):
        if not halves or time.thread_time() > end:
            break
        half = halves.pop(0)
        if half is not candidates:
            tried = _Cut(schema, groups, spared | set(half))
            if fits(tried.schema):
                spared, cut = spared | set(half), tried
                continue
        if len(half) > 1:
            middle = len(half) // 2
            halves += [half[:middle], half[middle:]]
    return cut.relaxed


class _Cut:
    """A schema without the keywords of these `groups`, unless their pointers are `spared`."""

    def __init__(
        self, schema: Any, groups: frozenset[str], spared: frozenset[str], *, depth: int | None = None
    ) -> None:
        self.pointers: list[str] = []
        self._groups = groups
        self._spared = spared
        self._depth = depth
        self._root = schema
        self._ids = _ids(schema)
        self._patterns: dict[str, bool] = {}
        self.schema = self._copy(schema, "", 0)

    @property
    def relaxed(self) -> Relaxed:
        return Relaxed(self.schema, tuple(self.pointers))

    def _copy(self, schema: Any, pointer: str, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        if self._depth is not None and depth > self._depth:
            self.pointers.append(pointer)
            return _typed(schema, None if self._ids else self._root)
        copy = dict(schema)
        for key in schema:
            if self._goes(key, schema[key], schema) and joined(pointer, key) not in self._spared:
                del copy[key]
                self.pointers.append(joined(pointer, key))
        if "patternProperties" in schema and "patternProperties" not in copy and "additionalProperties" in copy:
            del copy["additionalProperties"]  # it speaks of what no pattern took
            self.pointers.append(joined(pointer, "additionalProperties"))
        if schema.keys() & {"allOf", "$ref"} != copy.keys() & {"allOf", "$ref"} and "type" not in copy:
            copy |= _typed(schema, None if self._ids else self._root)
        if "oneOf" in copy:
            self.pointers.append(joined(pointer, "oneOf"))
            if "anyOf" in copy:
                del copy["oneOf"]
        replace_subschemas(copy, lambda keys, entry: self._copy(entry, joined(pointer, *keys), depth + 1))
        replace_one_of(copy)
        return copy

    def _goes(self, key: str, value: Any, schema: dict[str, Any]) -> bool:
        if key in _NO_GRAMMAR or key in self._groups:
            return True
        if key == "format":
            return value in STANDARD_FORMATS - _ENFORCED_FORMATS
        if key == "pattern":
            return not self._has_grammar(value)
        if key == "patternProperties":
            return not all(map(self._has_grammar, value))
        if key == "$ref":
            return not self._is_here(value)
        return False

    def _has_grammar(self, pattern: str) -> bool:
        known = self._patterns.get(pattern)
        if known is None and len(self._patterns) < MAX_PATTERNS:
            grammar = LLMatcher.grammar_from_json_schema(
                msgspec.json.encode({"type": "string", "pattern": pattern}).decode()
            )
            known = self._patterns[pattern] = not LLMatcher.validate_grammar(grammar)
        return known is not False

    def _is_here(self, reference: str) -> bool:
        """Whether a reference leads to a place in this document, as far as can be told."""
        if reference.startswith("#/"):
            return resolved(self._root, reference) is not None or len(self._ids) > 1
        return reference.startswith("#") or reference.partition("#")[0] in self._ids


def _ids(schema: Any, base: str = "") -> set[str]:
    """The addresses that parts of the document give themselves, as written and in full."""
    found: set[str] = set()
    if isinstance(schema, dict):
        if isinstance(given := schema.get("$id"), str):
            base = urljoin(base, given)
            found |= {given.rstrip("#"), base.rstrip("#")}
        replace_subschemas(dict(schema), lambda _, entry: found.update(_ids(entry, base)))
    return found
