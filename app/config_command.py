"""`headrace config`: the settings in force, as a settings file that says where each comes from."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.setting_sources import Given
from app.setting_types import has_password, is_secret
from app.settings import Settings


def add_flags(parser: ArgumentParser) -> None:
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--given", dest="only_given", action="store_true", help="Leave the defaults out.")


def run(settings: Settings, *, given: Mapping[str, Given], only_given: bool) -> int:
    """Print TOML that `--config` takes. Secrets are told of and not shown."""
    for name, field in Settings.model_fields.items():
        if name not in given and only_given:
            continue
        value, source = getattr(settings, name), given[name].where if name in given else "default"
        if value is None or (is_secret(field) and not value):
            line = f"# {name} is not set"
        elif is_secret(field) or has_password(value):
            line = f"# {name} is set and not shown"
        else:
            line = f"{name} = {_toml(value)}"
        print(f"{line}  # {source}")
    return 0


def _toml(value: Any) -> str:
    """A TOML value, which JSON's are but for objects, of which there are none."""
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False)
