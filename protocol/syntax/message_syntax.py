"""The served model's syntax of reasoning and calls, and tools for templates without them.

The chat template or the operator decides the family. Everything that depends on it is here: what the template gets, the
grammar, which special tokens are text, and how answers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

from msgspec import structs

from engine.messages import StructuredOutput
from protocol.syntax.formats import FORMATS, ToolFormat, format_of_template
from protocol.syntax.message_parts import MessageFormat
from protocol.syntax.reasoning import BRACKETS, THINK, ReasoningTags, SpecialTags
from protocol.tools.kinds import Function, ToolUse

ToolParser = Literal["auto", "hermes", "llama3", "mistral", "none"]
ReasoningParser = Literal["auto", "think", "none"]

_THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})  # setting one sets the others

PROMPT_TAIL = 16
"""Tokens at the end of a prompt that may open the reasoning."""


class MessageSyntax:
    """The served model's way of writing. Immutable.

    `template` is the source of its chat template, which reads `variables` and, with `knows_tools`, tools;
    `special_tokens` are the ids of the tokens that are left out of text. A template with tools of an unknown syntax
    counts as one without: the system message describes them.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, int],
        *,
        knows_tools: bool,
        variables: Set[str] = frozenset(),
        tool_parser: ToolParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> None:
        self._special_tokens = special_tokens
        detected = format_of_template(template) if knows_tools else None
        chosen = FORMATS.get(tool_parser, detected)
        self._tools: ToolFormat = chosen or FORMATS["hermes"]
        self._reads_calls = tool_parser != "none"
        self._uses_fallback = not knows_tools or (tool_parser == "auto" and chosen is None)
        self._reasoning = _reasoning_tags(template, reasoning_parser)
        self._variables = variables
        self._knows_no_effort = re.search(r"""(['"])none\1""", template) is not None

    def for_template(
        self, messages: Sequence[dict[str, Any]], tools: ToolUse | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages and the tools for the chat template."""
        functions = tools.functions if tools else ()
        messages = [self._with_known_ids(message) for message in messages]
        if self._uses_fallback:
            return without_tools(messages, functions, self._tools), None
        return messages, [function.for_template() for function in functions] or None

    def unread_fields(self, documents: object, variables: Iterable[str]) -> tuple[str, ...]:
        """Return the request's fields for the template that this template does not read."""
        read = self._variables | (_THINKING if self._variables & _THINKING else frozenset())
        unread = (f"chat_template_kwargs.{name}" for name in variables if name not in read)
        return (*(("documents",) if documents and "documents" not in read else ()), *unread)

    def thinking_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `given` variables, and the thinking variables that the template reads, set to match them.

        A client sets one of `enable_thinking`, `thinking` and `reasoning_effort`; a model's template may read another.
        """
        effort = given.get("reasoning_effort")
        thinks = given.get("enable_thinking", given.get("thinking", None if effort is None else effort != "none"))
        if effort is None and thinks is not None and (thinks or self._knows_no_effort):
            effort = ("high" if self._knows_no_effort else "medium") if thinks else "none"
        same = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
        read = {name: value for name, value in same.items() if value is not None and name in self._variables}
        return {**read, **given}

    def grammar(
        self, tools: ToolUse | None, asked: StructuredOutput | None, *, prompt_end: bytes
    ) -> StructuredOutput | None:
        """Return the grammar of the text. `asked` is the client's for an answer in words.

        A demanded call replaces it, because there is no such answer then. The model may reason before either.
        """
        grammar = asked
        if tools is not None and (tools.choice == "required" or (asked is None and self._reads_calls)):
            grammar = self._tools.grammar(tools)
        return grammar if grammar is None else structs.replace(grammar, reasoning=self.reasoning_tags(prompt_end))

    def reasoning_tags(self, prompt_end: bytes) -> tuple[str, str] | None:
        """Return the tags around the reasoning: "" for the first if the prompt has it, None for a model without it."""
        if self._reasoning is None:
            return None
        return "" if self._reasoning_is_open(prompt_end) else self._reasoning.opening, self._reasoning.closing

    def shown_special_tokens(self, tools: ToolUse | None) -> tuple[int, ...]:
        """Return the special tokens that must be in the text although others are left out: tags that are read."""
        return tuple(self._special_tokens[tag] for tag in self._tags(tools) if tag in self._special_tokens)

    def message_format(
        self,
        tools: ToolUse | None,
        *,
        prompt_end: bytes,
        show_reasoning: bool = True,
        hide_special_tokens: bool = True,
    ) -> MessageFormat:
        """Return how to read the answer. `prompt_end` is the text of the prompt's last `PROMPT_TAIL` tokens."""
        special = {tag: self._special_tokens[tag] for tag in self._tags(tools) if tag in self._special_tokens}
        tags = SpecialTags(special, shown=not hide_special_tokens)
        return MessageFormat(
            reasoning=self._reasoning,
            reasoning_is_open=self._reasoning_is_open(prompt_end),
            show_reasoning=show_reasoning,
            new_tool_reader=self._tools.reader(tools, tags) if tools and self._reads(tools) else None,
            call_is_demanded=tools is not None and tools.choice == "required",
            call_is_named=tools is not None and tools.named is not None,
            special_tags=tags,
        )

    def _with_known_ids(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with ids of calls that the template accepts: they may come from another model."""
        known = self._tools.known_call_id
        if known is None:
            return message
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [{**call, "id": known(call.get("id", ""))} for call in calls]}
        if "tool_call_id" in message:
            return {**message, "tool_call_id": known(message["tool_call_id"])}
        return message

    def _reasoning_is_open(self, prompt_end: bytes) -> bool:
        return self._reasoning is not None and prompt_end.rstrip().endswith(self._reasoning.opening.encode())

    def _reads(self, tools: ToolUse) -> bool:
        return self._reads_calls or tools.choice == "required"

    def _tags(self, tools: ToolUse | None) -> tuple[str, ...]:
        return (*(self._reasoning or ()), *(self._tools.tags if tools and self._reads(tools) else ()))


def _reasoning_tags(template: str, parser: ReasoningParser) -> ReasoningTags | None:
    if parser == "think":
        return THINK
    if parser == "none":
        return None
    return next((tags for tags in (THINK, BRACKETS) if tags.closing in template), None)


# ------------------------------------------------------------------------------------------------------------- fallback
# Tools for chat templates without them. The system message describes the functions and how to call them; calls and
# results of earlier turns become text.


Message = dict[str, Any]


def without_tools(messages: Sequence[Message], functions: Sequence[Function], tool_format: ToolFormat) -> list[Message]:
    """Return the conversation for a template that knows neither tools, nor their calls, nor the role of results."""
    plain = [_plain(message, tool_format) for message in messages]
    if not functions:
        return plain
    offer = _offer(functions, tool_format)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{content_text(plain[0]['content'])}\n\n{offer}"}, *plain[1:]]
    return [{"role": "system", "content": offer}, *plain]


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _offer(functions: Sequence[Function], tool_format: ToolFormat) -> str:
    tag = tool_format.tag("NAME", True)
    listed = "\n".join(json.dumps(function.for_template()["function"], ensure_ascii=False) for function in functions)
    return (
        "You can call functions to help the user. These are the functions, with the JSON Schemas of their "
        f"parameters:\n\n{listed}\n\n"
        "To call one, answer with its name and its arguments as a JSON object, exactly like this:\n\n"
        f"{tag.begin}{{ARGUMENTS}}{tag.end}\n\n"
        "The result comes with the next message. If no function is needed, just answer."
    )


def _plain(message: Message, tool_format: ToolFormat) -> Message:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{content_text(message['content'])}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        content = content_text(message["content"])
        written = [content] if content else []
        written += [_written(call["function"], tool_format) for call in calls]
        message = {**message, "content": "\n".join(written)}
        del message["tool_calls"]
    return message


def _written(function: Mapping[str, Any], tool_format: ToolFormat) -> str:
    tag = tool_format.tag(function["name"], True)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{tag.begin}{text}{tag.end}"
