"""What has to be done to a client's JSON Schema before it is compiled."""

from __future__ import annotations

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
