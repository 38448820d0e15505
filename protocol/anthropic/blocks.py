"""The turns of a conversation, their content blocks, and their translation into chat messages.

One Anthropic turn may be several chat messages, since chat has a message for each tool result. Consecutive turns of one
role are one turn. Images and files are an error in a user's turn; in tool results, the model sees a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from protocol.body import ClientModel, OneOf, at_most, fail_fast, json_text, type_of, with_type
from protocol.tools.unsupported import MAX_NAMED, UnsupportedEntry, UnsupportedPart

MAX_BLOCKS = 4096  # blocks of one turn
MAX_BLOCKS_IN_ALL = 16384

# Claude Code begins its system prompt with this line for the provider's accounting. The line differs in every request,
# so nothing after it could hit the prefix cache.
_BILLING = "x-anthropic-billing-header:"


class TextBlock(ClientModel):
    """Text. `cache_control` and `citations` are accepted without effect."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ClientModel):
    """The model's thoughts. The signature is accepted without effect."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(ClientModel):
    """Thoughts that only Anthropic can read: accepted without effect."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(ClientModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_TextBlocks = Annotated[list[Annotated[TextBlock, OneOf()]], fail_fast, at_most(MAX_BLOCKS, "blocks")]
_string_or_list = OneOf("a string or an array of content blocks")
Text = Annotated[str | _TextBlocks, _string_or_list]
"""A string, or blocks of text."""


class ToolReferenceBlock(ClientModel):
    """A tool that the client's own search found. The model knows the tool already: every request offers all tools."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"Found the tool {self.tool_name}."


class PlainTextSource(ClientModel):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(ClientModel):
    type: Literal["content"]
    content: Text

    @property
    def text(self) -> str:
        return text_of(self.content)


class DocumentBlock(ClientModel):
    """A document that comes as text."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, OneOf()]
    title: str = ""
    context: str = ""

    @property
    def text(self) -> str:
        return _lines(self.title, self.context, self.source.text)


class SearchResultBlock(ClientModel):
    type: Literal["search_result"]
    source: str
    title: str
    content: _TextBlocks

    @property
    def text(self) -> str:
        return _lines(self.title, self.source, text_of(self.content))


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


_SOURCES = ("text", "content")
_READ = ("text", "tool_reference", "search_result", "document")
_UNSUPPORTED_SOURCE = {"source": with_type({"type": "string", "not": {"enum": list(_SOURCES)}}).json_schema}
_UNSUPPORTED_SCHEMAS = [
    with_type({"type": "string", "not": {"enum": list(_READ)}}).json_schema,
    {
        "type": "object",
        "properties": {"type": {"const": "document"}, **_UNSUPPORTED_SOURCE},
        "required": ["type", "source"],
    },
]


def _result_kind(block: Any) -> Any:
    source = type_of(block.get("source")) if isinstance(block, dict) and block.get("type") == "document" else None
    return UnsupportedPart if isinstance(source, str) and source not in _SOURCES else type_of(block)


_Result = Annotated[
    TextBlock
    | ToolReferenceBlock
    | SearchResultBlock
    | DocumentBlock
    | Annotated[UnsupportedPart, WithJsonSchema({"anyOf": _UNSUPPORTED_SCHEMAS})],
    OneOf(kind_of=_result_kind),
]
_Results = Annotated[list[_Result], fail_fast, at_most(MAX_BLOCKS, "blocks")]


class ToolResultBlock(ClientModel):
    """A tool's result. `is_error` is accepted without effect: templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | _Results, _string_or_list] = ""


# Blocks that come from tools that Anthropic runs, and from its other services.
_UNSUPPORTED = (
    *("advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result", "compaction"),
    *("container_upload", "fallback", "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use", "server_tool_use"),
    *("text_editor_code_execution_tool_result", "tool_addition", "tool_removal", "tool_search_tool_result"),
    *("web_fetch_tool_result", "web_search_tool_result"),
)


def _is_unsupported(kind: str) -> bool:
    return kind in _UNSUPPORTED or kind.endswith(("_tool_use", "_tool_result"))  # future types, too


_Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | SearchResultBlock
    | Annotated[UnsupportedEntry, with_type({"enum": list(_UNSUPPORTED)})],
    OneOf(others=_is_unsupported),
]
Content = Annotated[str | Annotated[list[_Block], fail_fast, at_most(MAX_BLOCKS, "blocks")], _string_or_list]

_ONLY_IN = {
    **dict.fromkeys(("tool_result", "document", "search_result"), "user"),
    **dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant"),
}


class Turn(ClientModel):
    """One turn of the conversation. `system` is for instructions between the turns."""

    role: Literal["user", "assistant", "system"]
    content: Content

    def blocks(self) -> Sequence[_Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


def misplaced_block(turns: Sequence[Turn]) -> tuple[str, str] | None:
    """Return the path of the first block that its turn's role cannot have, and the error message."""
    for number, turn in enumerate(turns):
        for place, block in enumerate(turn.blocks()):
            if (role := _ONLY_IN.get(block.type, turn.role)) != turn.role:
                return f"messages.{number}.content.{place}.type", f"{block.type} is only for role {role}"
    return None


def with_results(turns: Iterable[Turn]) -> Iterator[Any]:
    """Yield the blocks of the turns, and those in tools' results."""
    for turn in turns:
        for block in turn.blocks():
            yield block
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                yield from block.content


def unanswered_calls(last: Turn) -> str:
    """Return the ids of the calls in a conversation's last turn, separated by commas."""
    calls = [block.id[:64] for block in last.blocks() if isinstance(block, ToolUseBlock)]
    return ", ".join(calls[:MAX_NAMED])


def text_of(content: str | list[Any]) -> str:
    """Return the text of a string or of blocks, joined as chat joins its parts."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def system_text(system: str | Sequence[TextBlock]) -> str:
    """Return the system prompt without the line for the provider's accounting; gateways may join other lines to it."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    kept = [text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts]
    return "\n".join(text for text, given in zip(kept, texts, strict=True) if text or not given)


def chat_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages. Raises `InvalidRequest` for a tool's input that is nested too
    deeply."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "assistant":
            _add_assistant(messages, turn)
        else:
            _add_user(messages, turn)
    return messages


def _add_user(messages: list[dict[str, Any]], turn: Turn) -> None:
    """Add a user's or system's turn: consecutive texts are one message, a tool's result is another."""
    for block in turn.blocks():
        if isinstance(block, ToolResultBlock):
            content = text_of(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
            _message_of(messages, turn.role)["content"].append({"type": "text", "text": block.text})


def _add_assistant(messages: list[dict[str, Any]], turn: Turn) -> None:
    if isinstance(turn.content, list) and all(isinstance(block, UnsupportedEntry) for block in turn.content):
        return  # an empty message would look like an answer that the client has begun
    message = _message_of(messages, "assistant")
    for block in turn.blocks():
        match block:
            case TextBlock():
                message["content"].append({"type": "text", "text": block.text})
            case ThinkingBlock():
                before = message.get("reasoning")
                message["reasoning"] = block.thinking if before is None else f"{before}\n{block.thinking}"
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json_text(block.input, "messages")}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)


def _message_of(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the last message if it has this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]
