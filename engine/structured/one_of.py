"""Which alternatives of a `oneOf` exclude each other, so that it means no more than `anyOf`.

The compiler takes a `oneOf` only as `anyOf`, and does not look behind references. What is said here is proven: a wrong
"no" costs a client the enforcement of one keyword, a wrong "yes" would be an answer that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.structured.pointers import resolved

MAX_STEPS = 40_000  # for one document; some tens of milliseconds
_MAX_DEPTH = 8

_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))
_TYPE_OF = {type(None): "null", bool: "boolean", dict: "object", list: "array", str: "string", int: "number"}


class Disjointness:
    """Compares schemas of one document, whose references may point to any place in it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._is_one_resource = not any(_has_address(value) for value in root.values())
        self._left = MAX_STEPS  # what the steps are counted from; at 0, nothing more is proven

    def all_apart(self, schemas: list[Any]) -> bool:
        """Whether no value fits two of these."""
        return all(
            self._apart(first, second, _MAX_DEPTH)
            for number, first in enumerate(schemas)
            for second in schemas[number + 1 :]
        )

    def _apart(self, first: Any, second: Any, depth: int) -> bool:
        if not self._may_go(1) or depth == 0:
            return False
        firsts, seconds = list(self._parts(first, depth)), list(self._parts(second, depth))
        common = _types(firsts) & _types(seconds)
        if not common:
            return True
        if self._no_common_value(firsts, seconds) or (
            common == {"object"} and self._objects_apart(firsts, seconds, depth)
        ):
            return True
        return self._each_option_apart(firsts, second, depth) or self._each_option_apart(seconds, first, depth)

    def _each_option_apart(self, parts: list[dict[str, Any]], other: Any, depth: int) -> bool:
        return any(
            isinstance(options := part.get(key), list)
            and options != []
            # An option is asked for together with what stands beside it.
            and all(self._apart({"allOf": [option, *_without_options(parts)]}, other, depth - 1) for option in options)
            for part in parts
            for key in ("anyOf", "oneOf")
        )

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """The schema and what it asks for beside: all of them have to hold."""
        if schema is False:
            yield {"enum": []}
        if not isinstance(schema, dict) or depth == 0 or not self._may_go(1):
            return
        yield schema
        if self._is_one_resource and isinstance(reference := schema.get("$ref"), str):
            yield from self._parts(resolved(self._root, reference), depth - 1)
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                yield from self._parts(part, depth - 1)

    def _no_common_value(self, firsts: list[dict[str, Any]], seconds: list[dict[str, Any]]) -> bool:
        # Python's equality takes more for equal than JSON's does (1 and true), so that it errs on the safe side.
        ours = [values for part in firsts if (values := _values(part)) is not None]
        theirs = [values for part in seconds if (values := _values(part)) is not None]
        return any(self._may_go(len(a) * len(b)) and not any(value in b for value in a) for a in ours for b in theirs)

    def _may_go(self, steps: int) -> bool:
        self._left -= steps
        return self._left >= 0

    def _objects_apart(self, firsts: list[dict[str, Any]], seconds: list[dict[str, Any]], depth: int) -> bool:
        """Whether two objects differ in a property that one of them must have."""
        required = _required(firsts) | _required(seconds)
        for name in sorted(required):
            if not self._may_go(len(firsts) + len(seconds)):
                return False
            if _forbids(firsts, name) or _forbids(seconds, name):
                return True
            pairs = ((a, b) for a in _declared(firsts, name) for b in _declared(seconds, name))
            if any(self._apart(a, b, depth - 1) for a, b in pairs):
                return True
        return False


def _has_address(value: Any) -> bool:
    """Whether a part has an address of its own, in which references mean places below that."""
    if isinstance(value, dict):
        return isinstance(value.get("$id"), str) or any(map(_has_address, value.values()))
    return isinstance(value, list) and any(map(_has_address, value))


def _without_options(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dropped = ("anyOf", "oneOf", "$ref", "allOf")  # what the last two stand for is among the parts
    return [{key: value for key, value in part.items() if key not in dropped} for part in parts]


def _types(parts: list[dict[str, Any]]) -> frozenset[str]:
    """The types that a value may have. Integers are numbers."""
    possible = _TYPES
    for part in parts:
        asked = part.get("type")
        names = [asked] if isinstance(asked, str) else asked
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            possible &= {"number" if name == "integer" else name for name in names}
        values = _values(part)
        if values is not None:
            possible &= {_TYPE_OF.get(type(value), "number") for value in values}
    return possible


def _values(part: dict[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _required(parts: list[dict[str, Any]]) -> set[str]:
    names = (name for part in parts if isinstance(part.get("required"), list) for name in part["required"])
    return {name for name in names if isinstance(name, str)}


def _declared(parts: list[dict[str, Any]], name: str) -> list[Any]:
    maps = (part["properties"] for part in parts if isinstance(part.get("properties"), dict))
    return [properties[name] for properties in maps if name in properties]


def _forbids(parts: list[dict[str, Any]], name: str) -> bool:
    return any(
        part.get("additionalProperties") is False
        and "patternProperties" not in part
        and isinstance(part.get("properties", {}), dict)
        and name not in part.get("properties", {})
        for part in parts
    )
