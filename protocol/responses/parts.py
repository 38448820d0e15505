"""Parts of items: the text that somebody has said, and the outputs of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from protocol.body import ClientModel, at_most, fail_fast, json_type, known_types, type_tag

MAX_PARTS = 1024  # of one item


class TextPart(ClientModel):
    """Text, whoever said it. Annotations are accepted without effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(ClientModel):
    """The words in which the assistant has refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_tag(value: Any) -> str:
    return "$refusal" if type_tag(value) == "$refusal" else "$text"


_Part = Annotated[
    Annotated[TextPart, Tag("$text")] | Annotated[RefusalPart, Tag("$refusal")],
    Discriminator(_part_tag),
    known_types("input_text", "output_text", "text", "refusal"),
]


Content = Annotated[
    Annotated[str, Tag("$string")] | Annotated[list[_Part], fail_fast, at_most(MAX_PARTS, "parts"), Tag("$array")],
    json_type("a string or an array of text parts"),
]


def texts(content: str | Sequence[TextPart | RefusalPart]) -> list[str]:
    """The texts of a string or of parts."""
    return [content] if isinstance(content, str) else [part.text for part in content]


def chat_content(content: str | Sequence[TextPart | RefusalPart]) -> str | list[dict[str, Any]]:
    """The same in chat's form."""
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in texts(content)]
