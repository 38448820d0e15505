"""JSON pointers and references within one document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def joined(pointer: str, *keys: str | int) -> str:
    """The pointer to a place below."""
    return pointer + "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in keys)


def resolved(root: Any, reference: str) -> Any:
    """What ``#``, ``#/$defs/a`` point to in a document; None if it is nothing, or not for us to say."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
