"""What has to be done to a client's JSON Schema before it is compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from engine.structured.one_of import Disjointness

# The formats that JSON Schema defines (draft 2020-12, validation, 7.3). The compiler enforces some of them and refuses
# the others by name. Any other `format` is a remark: OpenAPI's int32, double, password and so on.
STANDARD_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "json-pointer", "relative-json-pointer"),
        *("uuid", "regex"),
    )
)

# The compiler's automaton has a state for each remainder and none of its own limits stops its construction: 10,000 take
# 0.3 s and some MB, 500,000 take 10 s and 170 MB. Decimals count by their digits: 0.25 counts as 25.
MAX_DIVISOR = 10_000

_DIVISOR = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][0-9.eE+-]*)')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
# Where these stand two divisors may meet in one number, whose automaton then has a state for each pair of remainders.
_COMBINING = re.compile(r'"(?:allOf|anyOf|oneOf|patternProperties)"\s*:|"\$ref"\s*:\s*"[^"]*"\s*,|,\s*"\$ref"\s*:')
_SAYS_MORE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
SCHEMA = (
    *("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LIST_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAP_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# What only people read, in whatever form they wrote it; and the draft, since what is left is the latest.
_REMARKS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "discriminator", "externalDocs", "xml"),
    )
)


def prepared(schema: Any, *, closed: bool) -> Any:
    """A copy in the words of draft 2020-12, without remarks and without what demands nothing.

    Of the drafts before it and of OpenAPI 3.0 it knows arrays as `items`, bounds that are true or false, and
    `nullable`. A `oneOf` whose schemas exclude each other is an `anyOf`. If `closed`, objects take no properties but
    those that they declare or require, unless they say more about others. What is no schema, such as a constant, is
    left as it is.
    """
    if not isinstance(schema, dict):
        return schema
    copy = _prepared(schema, closed, is_root=True)
    return _with_merged_options(copy, Disjointness(copy))


def _prepared(schema: Any, closed: bool, *, is_root: bool = False) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = {key: value for key, value in schema.items() if key not in _REMARKS}
    if isinstance(copy.get("format"), str) and copy["format"] not in STANDARD_FORMATS:
        del copy["format"]
    if copy.get("uniqueItems") is False:
        del copy["uniqueItems"]
    if copy.get("allOf") == []:
        del copy["allOf"]
    if isinstance(address := copy.get("$id"), str) and "#" in address:
        copy["$id"] = address.partition("#")[0]  # older drafts had names there, and generators the place itself
        if not copy["$id"]:
            del copy["$id"]
    _use_latest_words(copy)
    if closed and isinstance(copy.get("properties"), dict) and not _SAYS_MORE & copy.keys():
        required = copy.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        copy["properties"] = {**copy["properties"], **{name: {} for name in names if name not in copy["properties"]}}
        copy["additionalProperties"] = False
    # Each of `allOf` declares a part: closed, one would forbid what another asks for.
    replace_subschemas(copy, lambda keys, entry: _prepared(entry, closed and keys[0] != "allOf"))
    nullable = copy.pop("nullable", False)
    return _or_null(copy) if nullable is True and not is_root else copy


def _use_latest_words(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("items"), list):
        items = schema.pop("items")
        if items:
            schema.setdefault("prefixItems", items)
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    schema.pop("additionalItems", None)
    schema.pop("$recursiveAnchor", None)
    if schema.get("$recursiveRef") == "#" and "$ref" not in schema:
        schema["$ref"] = schema.pop("$recursiveRef")
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)
    if isinstance(required := schema.get("required"), list) and all(isinstance(name, str) for name in required):
        schema["required"] = list(dict.fromkeys(required))


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, which takes null as well."""
    if not schema.keys() & {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"}:
        return schema
    if schema.keys() & {"const", "$ref", "allOf", "anyOf", "oneOf"}:
        return {"anyOf": [schema, {"type": "null"}]}
    asked = schema.get("type")
    if isinstance(asked, str | list):
        schema["type"] = list(dict.fromkeys((*([asked] if isinstance(asked, str) else asked), "null")))
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


Keys = tuple[str | int, ...]


def replace_subschemas(schema: dict[str, Any], replacement: Callable[[Keys, Any], Any]) -> None:
    """Put others in the place of the schemas directly in this one, which are told with the keys that lead to them."""
    for key, value in schema.items():
        if key in MAP_OF_SCHEMAS and isinstance(value, dict):
            schema[key] = {name: replacement((key, name), entry) for name, entry in value.items()}
        elif key in LIST_OF_SCHEMAS and isinstance(value, list):
            schema[key] = [replacement((key, number), entry) for number, entry in enumerate(value)]
        elif key in SCHEMA:
            schema[key] = replacement((key,), value)
        elif key == "components" and isinstance(value, dict) and isinstance(value.get("schemas"), dict):
            described = {name: replacement((key, "schemas", name), entry) for name, entry in value["schemas"].items()}
            schema[key] = {**value, "schemas": described}


def replace_one_of(schema: dict[str, Any]) -> None:
    """Call `oneOf` `anyOf`, in its place: properties come in the order of what declares them."""
    items = [("anyOf" if key == "oneOf" else key, value) for key, value in schema.items()]
    schema.clear()
    schema.update(items)


def _with_merged_options(schema: Any, disjointness: Disjointness) -> Any:
    """The same schema, in which each `oneOf` whose schemas exclude each other has become an `anyOf`."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("oneOf")
    if isinstance(options, list) and "anyOf" not in schema and disjointness.all_apart(options):
        replace_one_of(schema)
    replace_subschemas(schema, lambda _, entry: _with_merged_options(entry, disjointness))
    return schema


def uncountable(schema: Any) -> str | None:
    """What of `minProperties` no grammar can hold, in words; None if nothing is.

    Names that no schema declares may repeat in the text, and count once in the object.
    """
    if not isinstance(schema, dict):
        return None
    least, required = schema.get("minProperties"), schema.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names) + 1:
        return f"minProperties is only supported up to one more than the required properties, got {least}."
    found: list[str | None] = []
    replace_subschemas(dict(schema), lambda _, entry: found.append(uncountable(entry)))
    return next(filter(None, found), None)


def excessive_divisor(text: str, *, combined: bool) -> str | None:
    """What is too much of `multipleOf` in a text that holds JSON Schemas, in words; None if nothing is.

    `combined` says that its schemas may be alternatives for one place. The text is searched and not parsed: so it is
    found at any depth and in any notation, at worst where it is an example's and demands nothing.
    """
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    divisors: set[Fraction] = set()
    total = 0
    for (number,) in map(re.Match.groups, _DIVISOR.finditer(text)):
        states = _states(number)
        if states > MAX_DIVISOR:
            return f"multipleOf takes at most {MAX_DIVISOR}, decimals counted by their digits, got {number[:40]}."
        divisor = abs(Fraction(repr(float(number)))) if states else None
        if divisor is not None and divisor not in divisors:
            divisors.add(divisor)
            total += states
            if total > MAX_DIVISOR:
                return f"multipleOf takes at most {MAX_DIVISOR} in all, got {number[:40]} beside others."
    if divisors and (combined or _COMBINING.search(text)):
        common = math.lcm(*(divisor.numerator for divisor in divisors))
        shared = math.gcd(*(divisor.denominator for divisor in divisors))
        states = next(scaled for k in range(400) if (scaled := common * 10**k) % shared == 0) // shared
        if states > MAX_DIVISOR:
            return (
                f"multipleOf takes at most {MAX_DIVISOR} for the least common multiple of all its values where"
                f" alternatives meet, got {states if states < 10**20 else 'much more'}."
            )
    return None


def _states(number: str) -> int:
    """A divisor without its decimal point, which is how many remainders there are. What is no number counts as 0."""
    try:
        value = Decimal(repr(abs(float(number)))).normalize()  # as the compiler reads it
    except ValueError:
        return 0
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or exponent > 10:  # infinite, or as good as
        return MAX_DIVISOR + 1
    return int("".join(map(str, digits)) + "0" * exponent)
