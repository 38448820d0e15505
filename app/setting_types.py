"""What settings are made of besides pydantic's own types, and what their annotations say."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("empty")  # which would be the current directory
    return value


CommaSeparated = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
UserPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(Path.expanduser)]
CommaSeparatedSecrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split_commas)]


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value must never be shown."""
    return SecretStr in get_args(without_none(field.annotation))


def has_password(value: object) -> bool:
    """Whether it is a URL with one, or with a name that may be as secret."""
    return isinstance(value, str) and re.search(r"://[^/?#]*@", value) is not None


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation
