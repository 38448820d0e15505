"""Writes what values.schema.json of the chart beside this file says of `settings`, from app.config.settings. Run it
after a change of a setting; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from app.config.setting_types import is_secret, without_none
from app.config.settings import Settings

SCHEMA = Path(__file__).parent / "headrace" / "values.schema.json"
# A pod has its port alone, behind the TLS of an ingress; keys come from Secrets.
ELSEWHERE = {"port", "reuse_port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "api_keys_file"}

# What `headrace serve --help` says of a setting is not repeated, or each of its words would be here twice.
KEPT = ("type", "enum", "pattern", "minLength", "minimum", "exclusiveMinimum", "maximum")


def settings_schema() -> dict[str, Any]:
    """Properties of `settings`, in JSON Schema."""
    written = Settings.model_json_schema()["properties"]
    return {
        name: _property(written[name], is_size=without_none(field.annotation) is ByteSize)
        for name, field in sorted(Settings.model_fields.items())
        if name not in ELSEWHERE and not is_secret(field)
    }


def _property(written: dict[str, Any], *, is_size: bool) -> dict[str, Any]:
    if is_size:
        return {"type": ["integer", "string"]}
    given = written | written.get("anyOf", [{}])[0]  # what it is, and not null
    if given["type"] == "array":
        return {"type": "string"}  # commas in an environment variable
    return {key: value for key, value in given.items() if key in KEPT}


def written(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the settings as they are now."""
    settings = schema["properties"]["settings"] | {"properties": settings_schema()}
    return schema | {"properties": schema["properties"] | {"settings": settings}}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(written(json.loads(SCHEMA.read_text())), indent=2) + "\n")
