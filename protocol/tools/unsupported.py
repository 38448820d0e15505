"""Tools that only the API's vendor runs, their calls in a conversation, and images and files in tool results.

Clients offer such tools to every server, and a model need not use them. So the model is not shown them, and the request
does not fail; a header names them to the client (`IgnoredParts.warning`), metrics to the operator (`family`). Unknown
types are treated the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protocol.body import ClientModel

OTHER = "other"
FAMILIES = (
    *("advisor", "browser_toolset", "code_execution", "code_interpreter", "computer", "computer_toolset"),
    *("computer_use", "computer_use_preview", "file_search", "image_generation", "mcp", "mcp_toolset"),
    *("programmatic_tool_calling", "shell", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
    *("web_fetch", "web_search", "web_search_preview", OTHER),
)
"""Types of tools without the dates of versions: the labels of metrics, to which clients cannot add."""

MAX_NAMED = 16  # types in one warning

_VERSION = re.compile(r"_20\d\d_?\d\d_?\d\d$")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}( \(did you mean [a-z0-9_]{1,64}\?\))?")
_MEDIA = ("audio", "document", "file", "image", "video")


class UnsupportedEntry(ClientModel):
    """An entry of a type that this server does not support."""

    type: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type}


class UnsupportedPart(UnsupportedEntry):
    """A part of a tool's result that is not text: the model sees a note instead.

    An agent sends its whole conversation again, so refusing one image would fail every later request.
    """

    @property
    def text(self) -> str:
        word = self.type.removeprefix("input_").removesuffix("_url")
        return f"[{word if word in _MEDIA else 'part'} left out: this model reads text only]"


class IgnoredParts(NamedTuple):
    """The parts of a request that have no effect, each once: types of tools, types of items, names of fields.

    `unread` are fields that the chat template does not read, `keywords` those of JSON Schemas that no grammar enforces,
    `grammars` the names of custom tools with a grammar that is not enforced.
    """

    tools: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()

    def warning(self) -> str | None:
        """Return the value of the header `x-headrace-warning`; None if every part of the request has its effect."""
        entries = (("tools", self.tools), ("items", self.items))
        warnings = ["; ".join(f"{what} left out: {_listed(types)}" for what, types in entries if types)]
        if warnings[0]:
            warnings[0] += " (this server does not support them)"
        effects = (
            ("fields", _listed(self.fields), "this server does not use them"),
            ("fields", _listed(self.unread), "the chat template does not read them"),
            ("schema keywords", ", ".join(self.keywords), "no grammar enforces them"),
            ("grammars", _listed(self.grammars), "Lark in a tool's call is not enforced"),
        )
        warnings += [f"{what} without effect: {names} ({why})" for what, names, why in effects if names]
        return "; ".join(filter(None, warnings)) or None


def types_of(entries: Iterable[Any]) -> tuple[str, ...]:
    """Return the types of those entries that are `UnsupportedEntry`, each once."""
    return tuple(dict.fromkeys(entry.type for entry in entries if isinstance(entry, UnsupportedEntry)))


def family(kind: str) -> str:
    """Return the one of `FAMILIES` that a tool's type belongs to."""
    name = _VERSION.sub("", kind)
    return name if name in FAMILIES else OTHER


def _listed(types: Sequence[str]) -> str:
    # A header must not have bytes of the client's choice.
    words = dict.fromkeys(kind if _WORD.fullmatch(kind) else OTHER for kind in types)
    more = ["..."] if len(words) > MAX_NAMED else []
    return ", ".join([*list(words)[:MAX_NAMED], *more])
