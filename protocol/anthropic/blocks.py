"""The turns of a conversation, their content blocks, and their way into chat messages.

One turn of Anthropic's may be several of chat's: there, the results of tools are messages of their own. Turns of one
role that follow each other are one turn, as Anthropic has it. Images and documents are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from protocol.body import ClientModel, at_most, fail_fast, json_text, json_type, known_types, type_tag

MAX_BLOCKS = 4096  # of one turn
MAX_BLOCKS_IN_ALL = 16384

# Claude Code begins its system prompt with a line that differs from request to request. It speaks to the provider's
# accounting, and would spoil the prefix cache for everything behind it.
_BILLING = "x-anthropic-billing-header:"


class TextBlock(ClientModel):
    """Text. `cache_control` and `citations` are accepted without effect."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ClientModel):
    """What the model thought. The signature is accepted and not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(ClientModel):
    """Thoughts that only Anthropic can read: accepted without effect."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(ClientModel):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_string_or_list = json_type("a string or an array of content blocks")
_TextBlocks = Annotated[list[Annotated[TextBlock, known_types("text")]], fail_fast, at_most(MAX_BLOCKS, "blocks")]
Text = Annotated[Annotated[str, Tag("$string")] | Annotated[_TextBlocks, Tag("$array")], _string_or_list]
"""A string, or blocks of text."""


class ToolResultBlock(ClientModel):
    """What a tool has answered. `is_error` is accepted without effect: templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


_Block = Annotated[
    Annotated[TextBlock, Tag("$text")]
    | Annotated[ThinkingBlock, Tag("$thinking")]
    | Annotated[RedactedThinkingBlock, Tag("$redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("$tool_use")]
    | Annotated[ToolResultBlock, Tag("$tool_result")],
    Discriminator(type_tag),
    known_types("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
_Blocks = Annotated[list[_Block], fail_fast, at_most(MAX_BLOCKS, "blocks")]
Content = Annotated[Annotated[str, Tag("$string")] | Annotated[_Blocks, Tag("$array")], _string_or_list]

_ONLY_IN = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}


class Turn(ClientModel):
    """One turn of the conversation. `system` is for instructions between the turns."""

    role: Literal["user", "assistant", "system"]
    content: Content

    def blocks(self) -> Sequence[_Block]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


def misplaced_block(turns: Sequence[Turn]) -> tuple[str, str] | None:
    """The path of the first block that its turn's role cannot have, and what is wrong with it."""
    for number, turn in enumerate(turns):
        for place, block in enumerate(turn.blocks()):
            if (role := _ONLY_IN.get(block.type, turn.role)) != turn.role:
                return f"messages.{number}.content.{place}.type", f"{block.type} is only for role {role}"
    return None


def text_of(content: str | Sequence[TextBlock]) -> str:
    """The text of a string or of blocks, which are joined as chat joins its parts."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def system_text(system: str | Sequence[TextBlock]) -> str:
    """The system prompt, without what clients put there for the provider's accounting."""
    if isinstance(system, str):
        return system
    return text_of([block for block in system if not block.text.startswith(_BILLING)])


def chat_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The conversation as chat messages. Raises `InvalidRequest` for a tool's input that is nested too deeply."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "assistant":
            _add_assistant(messages, turn)
        else:
            _add_user(messages, turn)
    return messages


def _add_user(messages: list[dict[str, Any]], turn: Turn) -> None:
    """A user's or system's turn: texts that follow each other are one message, a tool's result is another."""
    for block in turn.blocks():
        if isinstance(block, ToolResultBlock):
            content = text_of(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            _message_of(messages, turn.role)["content"].append({"type": "text", "text": block.text})


def _add_assistant(messages: list[dict[str, Any]], turn: Turn) -> None:
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
    """The last message, if it is of this role, or else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]
