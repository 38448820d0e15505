"""The dialects that are spoken here, and which one a path speaks."""

from __future__ import annotations

from protocol.anthropic.dialect import ANTHROPIC
from protocol.dialect import Dialect
from protocol.openai.dialect import OPENAI
from protocol.responses.dialect import RESPONSES

DIALECTS = (OPENAI, RESPONSES, ANTHROPIC)

_BELOW = [(dialect.root + "/", dialect) for dialect in sorted(DIALECTS, key=lambda each: len(each.root), reverse=True)]


def dialect_of(path: str) -> Dialect:
    """The dialect of a path, which need not exist: that of the longest root above it. All others have OpenAI's."""
    path += "/"
    return next((dialect for root, dialect in _BELOW if path.startswith(root)), OPENAI)
