"""Prepare a client's JSON Schema for llguidance, and remove the keywords that llguidance does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urljoin

import msgspec
from llguidance import LLMatcher

# The formats that JSON Schema defines (draft 2020-12, validation, 7.3). The compiler enforces some of them and refuses
# the others by name. Any other `format` (OpenAPI's int32, double, password and so on) is an annotation.
_ENFORCED_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
STANDARD_FORMATS = _ENFORCED_FORMATS | {
    *("idn-email", "idn-hostname", "uri-reference", "uri-template", "iri", "iri-reference"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
_UNSUPPORTED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor"),
}
MAX_PATTERNS = 64  # patterns per request that are compiled separately, to see whether llguidance supports them
_SAYS_MORE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
_SCHEMA = (
    *("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAP_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Annotations, which may have any form; and `$schema`, because the result is always in the latest draft.
_REMARKS = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "discriminator", "externalDocs", "xml"),
}


def prepared(schema: Any, *, closed: bool) -> Any:
    """Return a copy in the keywords of draft 2020-12, without annotations and without keywords that have no effect.

    It also translates arrays as `items`, true or false as exclusive bounds, and `nullable` (older drafts, OpenAPI 3.0).
    A `oneOf` becomes an `anyOf` if its branches exclude each other. If `closed`, objects take only properties that they
    declare or require, unless a keyword describes others. A value that is no schema is returned unchanged.
    """
    if not isinstance(schema, dict):
        return schema
    schema = {key: value for key, value in schema.items() if key != "nullable"}
    # Within a subschema that has its own `$id`, references are relative to that subschema.
    return _prepared(schema, closed, None if _addresses({**schema, "$id": None}) else schema)


def without_unsupported(schema: dict[str, Any], known: dict[str, bool]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a `prepared` schema without keywords that llguidance does not support, and the names of those.

    The result accepts every value that `schema` accepts, and more. A `oneOf` becomes an `anyOf`. `known` caches which
    patterns llguidance supports, for all schemas of a request.
    """
    unenforced: dict[str, None] = {}
    addresses = _addresses(schema)

    def compiles(part: dict[str, Any]) -> bool:
        text = msgspec.json.encode(part).decode()
        if text not in known and len(known) < MAX_PATTERNS:
            known[text] = not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        return known.get(text, True)

    def supports(key: str, value: Any, part: dict[str, Any]) -> bool:
        match key, value:
            case "format", str():
                return value not in STANDARD_FORMATS - _ENFORCED_FORMATS
            case "pattern", str():
                return compiles({"type": "string", "pattern": value})
            case "patternProperties", dict():
                names: dict[str, Any] = {name: {} for name in value}
                return len(names) <= MAX_PATTERNS and compiles({"type": "object", "patternProperties": names})
            case "additionalProperties", _:  # it applies to properties that match no pattern
                return supports("patternProperties", part.get("patternProperties"), part)
            case "oneOf", _:
                return "anyOf" not in part
            case "minProperties" | "maxProperties", _:
                declared = part.get("properties", {})
                return isinstance(declared, dict) and declared.keys() <= _required(part).keys() and _may_count(part)
            case "$ref", str():
                if not value.startswith("#/"):
                    return value.startswith("#") or value.partition("#")[0] in addresses
                return len(addresses) > 1 or resolved(schema, value) is not None
        return key not in _UNSUPPORTED

    def reduced(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        copy = {key: value for key, value in part.items() if supports(key, value, part)}
        unenforced.update(dict.fromkeys(key for key in part if key not in copy or key == "oneOf"))
        copy = _with_any_of(copy)
        replace_subschemas(copy, lambda _, entry: reduced(entry))
        return copy

    return reduced(schema), tuple(unenforced)


def _prepared(schema: Any, closed: bool, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = {key: value for key, value in schema.items() if key not in _REMARKS}
    if isinstance(copy.get("format"), str) and copy["format"] not in STANDARD_FORMATS:
        del copy["format"]
    for key, nothing in (("uniqueItems", False), ("allOf", [])):
        if key in copy and copy[key] == nothing:
            del copy[key]
    if "anyOf" not in copy and _exclude_each_other(copy.get("oneOf"), root):
        copy = _with_any_of(copy)
    if isinstance(address := copy.get("$id"), str) and "#" in address:
        copy["$id"] = address.partition("#")[0]  # which is an anchor in older drafts
        if not copy["$id"]:
            del copy["$id"]
    _use_latest_words(copy)
    if closed and isinstance(copy.get("properties"), dict) and not _SAYS_MORE & copy.keys():
        declared = copy["properties"]
        copy["properties"] = declared | {name: {} for name in _required(copy) if name not in declared}
        copy["additionalProperties"] = False
    # Each schema of `allOf` declares a part of the properties: if closed, it would forbid the others.
    replace_subschemas(copy, lambda key, entry: _prepared(entry, closed and key != "allOf", root))
    return _or_null(copy) if copy.pop("nullable", False) is True else copy


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
    """Return the schema, changed so that it takes null as well."""
    if schema.keys() & {"const", "$ref", "allOf", "anyOf", "oneOf"}:
        return {"anyOf": [schema, {"type": "null"}]}
    asked = schema.get("type")
    if isinstance(asked, str | list):
        schema["type"] = list(dict.fromkeys((*([asked] if isinstance(asked, str) else asked), "null")))
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


def replace_subschemas(schema: dict[str, Any], replacement: Callable[[str, Any], Any]) -> None:
    """Replace each direct subschema by `replacement(keyword, subschema)`."""
    for key, value in schema.items():
        if key in _MAP_OF_SCHEMAS and isinstance(value, dict):
            schema[key] = {name: replacement(key, entry) for name, entry in value.items()}
        elif key in _LIST_OF_SCHEMAS and isinstance(value, list):
            schema[key] = [replacement(key, entry) for entry in value]
        elif key in _SCHEMA:
            schema[key] = replacement(key, value)
        elif key == "components" and isinstance(value, dict) and isinstance(value.get("schemas"), dict):
            schema[key] = {**value, "schemas": {name: replacement(key, it) for name, it in value["schemas"].items()}}


def _with_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Rename `oneOf` to `anyOf` in place: models write properties in the order of the declaring keywords."""
    return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}


def _exclude_each_other(options: Any, root: Any) -> bool:
    """Return True if no value fits two options: their types differ, or the constants of one required property.
    References are resolved in `root`, if given."""
    if not isinstance(options, list):
        return False
    branches = [resolved(root, each["$ref"]) if isinstance(each, dict) and "$ref" in each else each for each in options]
    types = [each.get("type") if isinstance(each, dict) and not each.get("nullable") else None for each in branches]
    others = ["number" if name == "integer" else name for name in types if name != "object"]
    if not all(isinstance(name, str) for name in types) or len(set(others)) < len(others):
        return False
    objects = [each for each, name in zip(branches, types, strict=True) if name == "object"]
    return len(objects) < 2 or any(_tells_apart(name, objects) for name in _required(objects[0]))


def _tells_apart(name: str, objects: Sequence[dict[str, Any]]) -> bool:
    seen: set[Any] = set()
    for each in objects:
        declared = properties.get(name) if isinstance(properties := each.get("properties"), dict) else None
        values = declared.get("enum", [declared.get("const")]) if isinstance(declared, dict) else [None]
        # The first repeated value ends the loop, so a schema is read at most twice, however often it is referred to.
        is_constant = isinstance(values, list) and all(isinstance(value, str | int) for value in values)
        if not is_constant or not seen.isdisjoint(values):
            return False
        seen.update(values)
    return all(name in _required(each) for each in objects)


def _required(schema: dict[str, Any]) -> dict[str, None]:
    names = schema.get("required")
    return dict.fromkeys(name for name in names if isinstance(name, str)) if isinstance(names, list) else {}


def resolved(root: Any, reference: Any) -> Any:
    """Return the part of a document that a reference such as ``#/$defs/a`` points to; None if there is none."""
    if not isinstance(reference, str) or reference[:1] != "#" or reference[1:2] not in ("", "/"):
        return None
    found = root
    for part in unquote(reference[2:]).split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found


def _addresses(schema: Any, base: str = "") -> set[str]:
    """Return the `$id`s of a schema and its subschemas, as written and as full URLs."""
    found: set[str] = set()
    if isinstance(schema, dict):
        if isinstance(given := schema.get("$id"), str) and (address := given.partition("#")[0]):
            with suppress(ValueError):  # not a URL
                base = urljoin(base, address)
            found = {address, base}
        replace_subschemas(dict(schema), lambda _, entry: found.update(_addresses(entry, base)))
    return found


def _may_count(schema: dict[str, Any]) -> bool:
    # The model may write an undeclared name twice, but it counts as one property.
    return not isinstance(least := schema.get("minProperties"), int | float) or least <= len(_required(schema)) + 1


def uncountable(schema: Any) -> str | None:
    """Return an error message if a schema has a `minProperties` that no grammar can enforce, else None."""
    if not isinstance(schema, dict):
        return None
    if not _may_count(schema):
        least = schema["minProperties"]
        return f"minProperties is only supported up to one more than the required properties, got {least}."
    found: list[str | None] = []
    replace_subschemas(dict(schema), lambda _, entry: found.append(uncountable(entry)))
    return next(filter(None, found), None)
