"""Parts of items: the text that somebody has said, and the outputs of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from protocol.body import ClientModel, at_most, fail_fast, json_type, known_types, type_of
from protocol.openai.chat import MAX_PARTS, RefusalPart
from protocol.tools.left_out import Unread, none_of


class TextPart(ClientModel):
    """Text, whoever said it. Annotations are accepted without effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_READ = ("input_text", "output_text", "text", "refusal")


def _part_tag(value: Any) -> str:
    kind = type_of(value)
    return "$refusal" if kind == "refusal" else "$unread" if isinstance(kind, str) and kind not in _READ else "$text"


_string_or_list = json_type("a string or an array of text parts")
_Part = Annotated[
    Annotated[TextPart, Tag("$text")] | Annotated[RefusalPart, Tag("$refusal")],
    Discriminator(_part_tag),
    known_types(*_READ),
]
Content = Annotated[
    Annotated[str, Tag("$string")] | Annotated[list[_Part], fail_fast, at_most(MAX_PARTS, "parts"), Tag("$array")],
    _string_or_list,
]
_OutputPart = Annotated[
    Annotated[TextPart, Tag("$text")]
    | Annotated[RefusalPart, Tag("$refusal")]
    | Annotated[Unread, Tag("$unread"), none_of(*_READ)],
    Discriminator(_part_tag),
]
Output = Annotated[
    Annotated[str, Tag("$string")]
    | Annotated[list[_OutputPart], fail_fast, at_most(MAX_PARTS, "parts"), Tag("$array")],
    _string_or_list,
]
"""What a tool has answered: of parts that are no text, the model is told that there were some."""


def texts(content: str | Sequence[TextPart | RefusalPart | Unread]) -> list[str]:
    """The texts of a string or of parts."""
    return [content] if isinstance(content, str) else [part.text for part in content]


def chat_content(content: str | Sequence[TextPart | RefusalPart | Unread]) -> str | list[dict[str, Any]]:
    """The same in chat's form."""
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in texts(content)]
