"""/openapi.json: the description of the API, made from the request models and the shapes of answers at the first call.

The ranges of sampling parameters are the engine's, so they are added to the models' types here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import schema_components
from pydantic.json_schema import models_json_schema

from engine.messages import LOW_END_EXCLUDED, RANGES
from protocol.body import build_models
from protocol.operations import Operation
from protocol.registry import DIALECTS, OPERATIONS, dialect_of

Json = dict[str, Any]

_REF = "#/components/schemas/"
_JSON = "application/json"

# One event of a stream. Its data is JSON, or [DONE] at the end of OpenAI's.
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

# Where a request's range differs from the engine's.
_RANGES: dict[str, tuple[float, float | None]] = {
    **RANGES,
    "top_k": (-1, RANGES["top_k"][1]),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (-1, None)),
    "top_logprobs": RANGES["logprobs"],
    "thinking_token_budget": (-1, RANGES["thinking_token_budget"][1]),
}

_ERRORS = {
    400: "The request cannot run as it is: the error names the field, what was given and what is allowed.",
    401: "A valid key is needed.",
    404: "There is no such model, object or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The request failed inside the server.",
    409: "Not possible in the present state.",
    503: "The model is being loaded, or the server is going away.",
    504: "The request did not finish in the time that it was given.",
}


def document(
    version: str, operations: Sequence[Operation] = OPERATIONS, sampling: Mapping[str, float | None] | None = None
) -> Json:
    """Return the whole description, OpenAPI 3.1. `sampling` has the defaults of requests for text."""
    models = dict.fromkeys(model for operation in operations for model in operation.request)
    answers: dict[type[Struct], None] = dict.fromkeys(dialect.error_answer for dialect in DIALECTS)
    answers |= dict.fromkeys(each.answer for each in operations if isinstance(each.answer, type))
    build_models()
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF + "{model}"
    )
    answer_schemas, answer_definitions = schema_components(answers, ref_template=_REF + "{name}")
    schema_of: dict[Any, Json] = {model: schema for (model, _), schema in references.items()}
    schema_of |= dict(zip(answers, answer_schemas, strict=True))
    for schema in answer_definitions.values():  # a field with a default is always written
        fields = schema.get("properties", {})
        schema["required"] = [*schema.get("required", ()), *(name for name in fields if "default" in fields[name])]
        for field in fields.values():
            field.pop("default", None)
    definitions = {**definitions["$defs"], **answer_definitions}
    schemas = {name: _without_titles(schema) for name, schema in definitions.items()}
    for operation in operations:
        if operation.streams:  # counting tokens ignores sampling parameters
            for model in operation.request:
                schema = schemas[schema_of[model]["$ref"].removeprefix(_REF)]
                _add_ranges(schema)
                for name, value in (sampling or {}).items():
                    schema["properties"].get(name, {})["default"] = value
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "A server for large language models. Fields that are not named here are accepted without "
            "effect, or refused with a 400 that names them. A field that is null counts as absent.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_SECTIONS = {  # of /docs, by a dialect's root; other paths are in the section of /v1 or the server's
    "/v1": "OpenAI, and others below /v1",
    "/v1/responses": "Responses",
    "/v1/messages": "Anthropic",
    "/v1/rerank": "Reranking, scores, classes",
    "/api": "Ollama",
}


def _described(operation: Operation, schema_of: dict[Any, Json]) -> Json:
    content: Json | None
    if isinstance(operation.answer, type):
        content = {_JSON: {"schema": schema_of[operation.answer]}}
    else:
        content = None if operation.answer is None else {operation.answer: {}}
    dialect = dialect_of(operation.path)
    if operation.streams and content is not None:
        kind = dialect.stream_type.partition(";")[0]
        content[kind] = {"schema": _EVENT if kind == "text/event-stream" else {"type": "object"}}
    answer = {"description": "The answer."} | ({"content": content} if content else {})
    error = dialect.error_answer
    statuses = operation.errors if operation.is_open else (401, *operation.errors)
    described: Json = {
        "summary": operation.summary,
        "tags": [_SECTIONS.get(dialect.root) or (_SECTIONS["/v1"] if operation.path.startswith("/v1/") else "Server")],
        "operationId": f"{operation.method}{re.sub('[^a-z0-9]+', '_', operation.path)}".rstrip("_"),
        "responses": {
            **{str(status): answer for status in (200, *operation.also)},
            **{
                str(status): {"description": _ERRORS[status], "content": {_JSON: {"schema": schema_of[error]}}}
                for status in statuses
            },
        },
    }
    if not operation.is_open:
        described["security"] = [{"bearer": []}, {"key": []}, {}]
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.request:
        schemas = [schema_of[model] for model in operation.request]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        kind = "multipart/form-data" if operation.is_form else _JSON
        described["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return described


def _add_ranges(schema: Json) -> None:
    """Add the ranges of sampling parameters to a model's schema."""
    for name, (low, high) in _RANGES.items():
        least = "exclusiveMinimum" if name in LOW_END_EXCLUDED else "minimum"
        for kind in _numbers(schema["properties"].get(name, {})):
            kind.update(({least: low} if high is None else {least: low, "maximum": high}) | kind)  # a model's own wins


def _numbers(schema: Json) -> list[Json]:
    """Return the parts of a field's schema that take numbers."""
    return [part for part in (schema, *schema.get("anyOf", ())) if part.get("type") in ("integer", "number")]


def _without_titles(schema: Any) -> Any:
    """Return a schema without titles, which repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may be called "title"; then it is an object.
    return {
        name: _without_titles(value)
        for name, value in schema.items()
        if not (name == "title" and isinstance(value, str))
    }
