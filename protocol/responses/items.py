"""Items of a conversation: messages, calls and their outputs, reasoning; and their translation into chat messages.

One turn of the assistant in chat (reasoning, text, calls) is several consecutive items here. Images and files in
messages are an error that names the type; in a tool's result, the model sees a text note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, TypeAdapter

from protocol import body
from protocol.errors import ApiError, shown
from protocol.openai.chat import MAX_PARTS
from protocol.responses.tools import BuiltInOutputItem, CallItem, CallOutputItem, Content, chat_content, new_id, texts
from protocol.tools.unsupported import UnsupportedEntry

MAX_ITEMS = 16384
MAX_PARTS_IN_ALL = 16384
MAX_LISTED = 100  # on a page
DEFAULT_LISTED = 20


class MessageItem(body.ClientModel):
    """A message of the conversation. Its `phase` is only returned: templates know a preamble by the call after it."""

    type: Literal["message"] = "message"
    id: str = Field(default_factory=lambda: new_id("msg"))
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    status: str = "completed"
    phase: Literal["commentary", "final_answer"] | None = None

    def listed(self) -> dict[str, Any]:
        if self.role == "assistant":
            parts = [_output_text(text) for text in texts(self.content)]
        else:
            parts = [{"type": "input_text", "text": text} for text in texts(self.content)]
        item = {"id": self.id, "type": "message", "role": self.role, "status": self.status, "content": parts}
        return _with_phase(item, self.phase)


class _ReasoningText(body.ClientModel):
    text: str


class ReasoningItem(body.ClientModel):
    """The model's thoughts. `summary` and `encrypted_content`, which are empty here, are accepted without effect."""

    type: Literal["reasoning"]
    id: str = Field(default_factory=lambda: new_id("rs"))
    content: Annotated[list[_ReasoningText], body.fail_fast, body.at_most(MAX_PARTS, "parts")] = Field(
        default_factory=list
    )
    status: str = "completed"

    def listed(self) -> dict[str, Any]:
        return reasoning_item(self.id, [part.text for part in self.content], self.status)


class ItemReference(body.ClientModel):
    """A reference to an item of an earlier response that this server stores."""

    type: Literal["item_reference"]
    id: str

    @property
    def response_id(self) -> str:
        """The id of the response with this item; see `item_id`."""
        return "resp_" + self.id.partition("_")[2].rpartition("_")[0]


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response. It contains the response's id, so references need no index."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{index}"


Item = MessageItem | CallItem | CallOutputItem | BuiltInOutputItem | ReasoningItem


# Items that come from tools that OpenAI runs, and from its other services.
_UNSUPPORTED = (
    *("additional_tools", "code_interpreter_call", "compaction", "compaction_trigger", "computer_call"),
    *("computer_call_output", "configuration_update", "file_search_call", "image_generation_call", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "program", "program_output"),
    *("tool_search_call", "tool_search_output", "web_search_call"),
)


def _is_unsupported(kind: str) -> bool:
    return kind in _UNSUPPORTED or kind.endswith(("_call", "_call_output"))  # future types, too


_Item = Annotated[
    Item | ItemReference | Annotated[UnsupportedEntry, body.with_type({"enum": list(_UNSUPPORTED)})],
    body.OneOf(default="message", others=_is_unsupported),
]
Items = Annotated[
    list[_Item], body.fail_fast, body.at_most_inside(MAX_PARTS_IN_ALL, "parts"), body.at_most(MAX_ITEMS, "items")
]

_ITEMS: TypeAdapter[list[_Item]] = TypeAdapter(list[_Item], config=ConfigDict(defer_build=True))


def stored_items(listed: Sequence[dict[str, Any]]) -> list[Item]:
    """Parse the items that `listed` wrote, or those of a response's output."""
    return [item for item in _ITEMS.validate_python(listed) if not isinstance(item, ItemReference | UnsupportedEntry)]


def message_item(
    item_id: str, text: str, status: str, logprobs: orjson.Fragment | None = None, phase: str | None = None
) -> dict[str, Any]:
    """Return the assistant's text as an item of a response."""
    part = _output_text(text, logprobs)
    item = {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
    return _with_phase(item, phase)


def _with_phase(item: dict[str, Any], phase: str | None) -> dict[str, Any]:
    return item if phase is None else {**item, "phase": phase}


def reasoning_item(item_id: str, texts: Iterable[str], status: str) -> dict[str, Any]:
    """Return the model's thoughts as an item of a response."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
        "encrypted_content": None,
        "status": status,
    }


def listed(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the items of a conversation as the API lists them. An item that was sent twice gets a second id."""
    seen: set[str] = set()
    shown = []
    for item in items:
        fields = item.listed()
        if fields["id"] in seen:
            fields = {**fields, "id": new_id(fields["id"].partition("_")[0])}
        seen.add(fields["id"])
        shown.append(fields)
    return shown


def listing(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> bytes:
    """Return a page of items: `limit` of them in this `order`, after the item with the id `after`.

    Raises `ApiError` 400 for a wrong query.
    """
    order, after = body.page_order(query), query.get("after")
    limit = body.page_size(query.get("limit", str(DEFAULT_LISTED)), MAX_LISTED)
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise ApiError(400, f"after must be the id of one of the items, got {shown(after)}.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + limit]
    return body.page_body(page, has_more=start + len(page) < len(ordered), object="list")


def _output_text(text: str, logprobs: orjson.Fragment | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages. Consecutive thoughts, a text and calls are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                message = _assistant_without(messages, "content", "tool_calls")
                message["content"] = chat_content(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": chat_content(item.content)})
            case ReasoningItem():
                message = _assistant_without(messages, "reasoning", "content", "tool_calls")
                message["reasoning"] = "\n".join(part.text for part in item.content)
            case CallItem():
                _assistant_without(messages).setdefault("tool_calls", []).append(item.for_chat())
            case CallOutputItem() | BuiltInOutputItem():
                messages.append(item.for_chat())
    return messages


def with_outputs(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items and the parts of tools' outputs."""
    for item in items:
        yield item
        if isinstance(item, CallOutputItem) and not isinstance(item.output, str):
            yield from item.output


def _assistant_without(messages: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """Return the last message if it is the assistant's and has none of these keys, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in keys):
        messages.append({"role": "assistant"})
    return messages[-1]
