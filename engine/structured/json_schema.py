"""What has to be done to a client's JSON Schema before it is compiled."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
_SCHEMA = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def prepared(schema: Any, *, closed: bool) -> Any:
    """A copy without the keywords that demand nothing, though the compiler would refuse them.

    If `closed`, objects take no properties but those that they declare, unless they say more about others. What is no
    schema, such as a constant or an example, is left as it is.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    if isinstance(copy.get("format"), str) and copy["format"] not in STANDARD_FORMATS:
        del copy["format"]
    if copy.get("uniqueItems") is False:
        del copy["uniqueItems"]
    if closed and "properties" in copy and not _SAYS_MORE & copy.keys():
        copy["additionalProperties"] = False
    for key, value in copy.items():
        if key in _MAP_OF_SCHEMAS and isinstance(value, dict):
            copy[key] = {name: prepared(entry, closed=closed) for name, entry in value.items()}
        elif key in _LIST_OF_SCHEMAS and isinstance(value, list):
            # Each of `allOf` declares a part: closed, one would forbid what another asks for.
            copy[key] = [prepared(entry, closed=closed and key != "allOf") for entry in value]
        elif key in _SCHEMA:
            copy[key] = prepared(value, closed=closed)
    return copy


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
