"""The page at /docs: an OpenAPI description as plain HTML, readable without a network."""

from __future__ import annotations

import json
from html import escape
from typing import Any

Json = dict[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
code, summary b { font-family: ui-monospace, monospace; font-size: .9em; }
details { border: 1px solid #ddd; border-radius: 4px; margin: .5rem 0; padding: .5rem 1rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { border-bottom: 1px solid #eee; padding: .25rem .5rem; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; }
  td, th, details { border-color: #444; }
}
"""


def render(document: Json) -> str:
    """The page. Everything that comes from `document` is escaped."""
    schemas = document["components"]["schemas"]
    operations = "\n".join(
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    objects = "\n".join(_object(name, schema) for name, schema in sorted(schemas.items()))
    info = document["info"]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])} {escape(info["version"])}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>{escape(info["title"])} {escape(info["version"])}</h1>
<p>{escape(info["description"])} For programs: <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>
{operations}
<h2>Objects</h2>
{objects}
</body></html>
"""


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    parts = [f"<details><summary><b>{method.upper()} {escape(path)}</b> {escape(operation['summary'])}</summary>"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts += [
            f"<p>Body: {_type(schema)}</p>{_fields(_resolved(schema, schemas))}" for schema in body.get("anyOf", [body])
        ]
    rows = []
    for status, answer in operation["responses"].items():
        kinds = " or ".join(
            _type(content["schema"]) if kind == "application/json" and "schema" in content else f"<code>{kind}</code>"
            for kind, content in answer.get("content", {}).items()
        )
        rows.append(f"<tr><td>{status}</td><td>{kinds or 'empty'}</td><td>{escape(answer['description'])}</td></tr>")
    parts.append(f"<table><tr><th>status</th><th>body</th><th></th></tr>{''.join(rows)}</table></details>")
    return "".join(parts)


def _object(name: str, schema: Json) -> str:
    about = escape(schema.get("description", "")).replace("\n\n", "<br>")
    heading = f'<details id="{escape(name)}"><summary><b>{escape(name)}</b></summary>'
    return f"{heading}<p>{about}</p>{_fields(schema)}</details>"


def _fields(schema: Json) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else _default(field)
        rows.append(f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td><td>{note}</td></tr>")
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>" if rows else ""


def _default(field: Json) -> str:
    value = field.get("default")
    return "" if value is None else f"default <code>{escape(json.dumps(value))}</code>"


def _resolved(schema: Json, schemas: Json) -> Json:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _type(schema: Json) -> str:
    """A type in a few words, with its range."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(each) for each in schema[key] if each.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    words = [str(schema.get("type", "anything"))]
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None:
        words.append(f"from {low}" if "minimum" in schema else f"above {low}")
    if high is not None:
        words.append(f"to {high}")
    return escape(" ".join(words))
