"""The dialects that are spoken here, and which one a path speaks."""

from __future__ import annotations

from collections.abc import Collection

from protocol.anthropic.dialect import ANTHROPIC
from protocol.dialect import Dialect
from protocol.openai.dialect import OPENAI
from protocol.responses.dialect import RESPONSES

DIALECTS = (OPENAI, RESPONSES, ANTHROPIC)

_ROOTS = [(root, dialect) for dialect in DIALECTS for root in (dialect.root, *dialect.retired)]
_BELOW = [(root + "/", dialect) for root, dialect in sorted(_ROOTS, key=lambda each: len(each[0]), reverse=True)]
_SHARED = [(root + "/", dialect) for dialect in DIALECTS for root in dialect.shared_roots]


def dialect_of(path: str, headers: Collection[str] = ()) -> Dialect:
    """The dialect of a path, which need not exist: that of the longest root above it. All others have OpenAI's.

    Of a path that two dialects share, the names of the request's headers tell, in lower case.
    """
    path += "/"
    for root, dialect in _SHARED:
        if path.startswith(root) and dialect.client_header in headers:
            return dialect
    return next((dialect for root, dialect in _BELOW if path.startswith(root)), OPENAI)
