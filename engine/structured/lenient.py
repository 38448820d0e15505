"""From a lenient `StructuredOutput` that cannot be enforced to one that can, and what that leaves out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from engine.messages import MAX_GRAMMAR_CHARACTERS, StructuredOutput, StructuredOutputKind, Unenforced
from engine.structured.grammar import refused
from engine.structured.json_schema import prepared
from engine.structured.relaxation import ENOUGH_SECONDS, Relaxed, invalid, least, outermost, relax

MAX_POINTERS = 64  # told of one schema
MAX_POINTER = 256  # characters

CanCompile = Callable[[StructuredOutput], bool]


class Loosened(NamedTuple):
    """What can be enforced of a `StructuredOutput`, and what of its schemas cannot."""

    enforced: StructuredOutput
    unenforced: tuple[Unenforced, ...]


def loosened(structured: StructuredOutput, can_compile: CanCompile) -> Loosened:
    """`structured` with its schemas relaxed where they have to be.

    Raises InvalidRequest for what is no JSON Schema at all. The compiler is asked a bounded number of times: for each
    schema as long as there is time, and for all of them together. Schemas whose turn comes later are cut unasked.
    """
    value = msgspec.json.decode(structured.value)
    is_tagged = structured.kind is StructuredOutputKind.STRUCTURAL_TAG
    places = value["tags"] if is_tagged else [{"schema": value, "lenient": True}]
    end = time.thread_time() + ENOUGH_SECONDS
    unenforced: dict[int, Unenforced] = {}
    late: dict[int, Any] = {}

    def leave_out(number: int, schema: Any, found: Relaxed) -> None:
        if found.left_out:
            places[number]["schema"] = found.schema
            unenforced[number] = _told(number, schema, found.left_out)

    def enforced() -> StructuredOutput:
        changed = value if is_tagged else places[0]["schema"]
        return structs.replace(structured, value=_text(changed), lenient=False, closed=False)

    asked: dict[int, Any] = {}
    for number, place in enumerate(places):
        schema = prepared(place["schema"], closed=structured.closed)
        place["schema"] = schema
        if not place["lenient"] or not isinstance(schema, dict):
            continue
        asked[number] = schema
        if (complaint := invalid(schema)) is not None:
            raise refused(complaint)

        def fits(tried: Any) -> bool:
            return can_compile(_json_schema(tried, structured))

        if len(places) > 1 and time.thread_time() >= end:
            late[number] = schema
            leave_out(number, schema, least(schema))
        elif len(places) == 1 or not fits(schema):
            found = relax(schema, fits, seconds=max(0.0, end - time.thread_time()))
            if found is not None:
                leave_out(number, schema, found)
    if late and not can_compile(enforced()):
        for number, schema in late.items():
            leave_out(number, schema, Relaxed(outermost(schema), ("",)))
    excess = len(enforced().value) - MAX_GRAMMAR_CHARACTERS
    sizes = {number: len(_text(places[number]["schema"])) for number in asked} if excess > 0 else {}
    for number in sorted(sizes, key=lambda number: -sizes[number]):  # the longest first, until the others fit
        if excess > 0:
            leave_out(number, asked[number], Relaxed(outermost(asked[number]), ("",)))
            excess -= sizes[number] - len(_text(places[number]["schema"]))
    return Loosened(enforced(), tuple(unenforced[number] for number in sorted(unenforced)))


def _told(number: int, schema: Any, left_out: tuple[str, ...]) -> Unenforced:
    pointers = tuple(pointer[:MAX_POINTER] for pointer in left_out[:MAX_POINTERS])
    return Unenforced(number=number, pointers=pointers, schema=_text(schema))


def _json_schema(schema: Any, like: StructuredOutput) -> StructuredOutput:
    return structs.replace(
        like,
        kind=StructuredOutputKind.JSON_SCHEMA,
        value=_text(schema),
        closed=False,
        lenient=False,
        reasoning=None,
    )


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
