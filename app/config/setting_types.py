"""The types of settings in addition to pydantic's, and helpers that read their annotations."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo


def _as_list(value: object) -> object:
    """Read text as a JSON array if it begins like one, else as comma-separated parts."""
    if not isinstance(value, str):
        return value
    if value.strip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("empty")  # an empty path would be the current directory
    return value


def check_key(key: SecretStr) -> SecretStr:
    """Return the key if a client can send it. Raises ValueError for an empty one, which a header without a value would
    match, and for one with blanks around it or line breaks in it, which no header could match."""
    text = key.get_secret_value()
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError("not a key")
    return key


def _check_keys(keys: Iterable[SecretStr]) -> tuple[SecretStr, ...]:
    checked = tuple(check_key(key) for key in keys)
    if not checked:
        raise ValueError("no key")  # an empty list would open the server to every client
    return checked


def _as_tables(value: object) -> object:
    """Read the tables of several models: an object by name, as JSON where it is text, or a list of models."""
    if isinstance(value, str) and value.strip().startswith("{"):
        value = json.loads(value)
    names = _as_list(value)
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        return {each: {"model": each} for each in names}
    return value


def spelled(**others: str) -> BeforeValidator:
    """Return a validator that takes vLLM's words, too, each for the value here."""
    return BeforeValidator(lambda value: others.get(value, value) if isinstance(value, str) else value)


Tables = Annotated[dict[str, dict[str, Any]], BeforeValidator(_as_tables)]
StringList = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
UserPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(Path.expanduser)]
Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_as_list), AfterValidator(_check_keys)]


def is_secret(field: FieldInfo) -> bool:
    """Return True if a setting's value must never be shown."""
    return SecretStr in get_args(without_none(field.annotation))


def has_password(value: object) -> bool:
    """Return True for a URL with a password, or with a user name, which may be as secret."""
    return isinstance(value, str) and re.search(r"://[^/?#]*@", value) is not None


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation
