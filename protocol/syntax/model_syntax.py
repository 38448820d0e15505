"""The syntax in which the served model writes tool calls and reasoning, applied to requests. The `Syntax` is recognized
from the chat template or set by the operator (`tool_parser`).

Everything that differs between model families goes through here: the messages and tools passed to the template, the
grammar, the special tokens that are kept in the text, and the parsing of answers.

Tools are passed to a template that renders them; if its syntax is unknown, calls are returned as plain text, without
guessing. If the template does not render tools, the system message describes them in the known syntax. In two cases the
system message teaches the server's own syntax (`DESCRIBED`): the template renders no tools and its syntax is unknown,
or a call is required and the syntax is unknown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from engine.messages import StructuredOutput
from protocol.chat_template import ChatTemplate
from protocol.syntax.history import find_form, for_form, with_declaration
from protocol.syntax.message_parts import MessageFormat
from protocol.syntax.reasoning import BRACKETS, THINK, ReasoningParser, ReasoningTags, SpecialTags, ToolParser
from protocol.syntax.record import Message, Reading, Syntax
from protocol.syntax.registry import DESCRIBED, SYNTAXES, syntax_of
from protocol.tools.kinds import ToolUse

logger = logging.getLogger(__name__)

_THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})  # if a client sets one, the others follow


class ModelSyntax:
    """The served model's way of writing. Immutable.

    `template` is rendered a few times to find out what it shows. `special_tokens` are the ids of the tokens that are
    left out of text. `name` is the model's, for the log.
    """

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Mapping[str, int],
        *,
        name: str = "the model",
        tool_parser: ToolParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> None:
        self._special_tokens = special_tokens
        self._variables = template.variables
        known = SYNTAXES.get(tool_parser) or syntax_of(template.source, special_tokens)
        self._syntax: Syntax = known or DESCRIBED
        self._form = find_form(template, self._syntax)
        self._is_unknown = known is None and self._form.declares_tools
        self._reads_calls = tool_parser != "none" and not self._is_unknown
        self._splits_reasoning = reasoning_parser != "none"
        self._reasoning = self._syntax.reasoning or _reasoning_tags(template.source)
        if reasoning_parser != "auto":
            self._reasoning = THINK if reasoning_parser == "think" else None
        tags = self._reasoning or ()
        self._reasoning_tokens = {
            token: token_id for token, token_id in special_tokens.items() if any(token in tag for tag in tags)
        }
        efforts = {effort for _, effort in re.findall(r"""(['"])(none|medium|high)\1""", template.source)}
        self._knows_no_effort = "none" in efforts
        self._usual_effort = "high" if self._knows_no_effort or efforts == {"high"} else "medium"
        if self._is_unknown and tool_parser == "auto":
            logger.warning(
                "The chat template of %s writes tool calls in a syntax that is not known here: calls that the model "
                "makes stay text. Set tool_parser to one of %s if it writes them so",
                name,
                ", ".join(SYNTAXES),
            )
        elif not self._form.declares_tools:
            logger.info(
                "The chat template of %s declares no tools: those of a request are described in the system message, "
                "and calls begin with %s",
                name,
                self._syntax.opening,
            )

    @property
    def name(self) -> str:
        """The name of the syntax in which calls are read; `none` if they stay text."""
        return self._syntax.name if self._reads_calls else "none"

    @property
    def can_think(self) -> bool:
        """True if the model writes reasoning before its answer."""
        return self._reasoning is not None

    def for_template(
        self, messages: Sequence[Message], tools: ToolUse | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Return the messages and the tools for the chat template."""
        functions = tools.functions if tools else ()
        shown = for_form(messages, self._form, self._syntax)
        if self._form.declares_tools and not (self._is_unknown and tools and tools.choice == "required"):
            return shown, [function.for_template() for function in functions] or None
        return with_declaration(shown, functions, self._syntax), None

    def unread_fields(self, documents: object, variables: Iterable[str], effort: str | None = None) -> tuple[str, ...]:
        """Return the names of the request's template fields that have no effect on this template."""
        read = self._variables | (_THINKING if self._variables & _THINKING else frozenset())
        unread = (f"chat_template_kwargs.{name}" for name in variables if name not in read)
        always_thinks = effort == "none" and effort in self._syntax.efforts
        fields = {"documents": documents and "documents" not in read, "reasoning_effort": always_thinks}
        return (*(name for name, is_unread in fields.items() if is_unread), *unread)

    def thinking_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `given` variables, and the thinking variables that the template reads, set to match them.

        A client sets one of `enable_thinking`, `thinking` and `reasoning_effort`; a model's template may read another.
        """
        effort = given.get("reasoning_effort")
        thinks = given.get("enable_thinking", given.get("thinking", None if effort is None else effort != "none"))
        if effort is None and thinks is not None and (thinks or self._knows_no_effort or self._syntax.efforts):
            effort = self._usual_effort if thinks else "none"
        effort = self._syntax.efforts.get(effort, effort) if isinstance(effort, str) else effort
        same = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
        read = {name: value for name, value in same.items() if value is not None and name in self._variables}
        return {**read, **given, **({"reasoning_effort": effort} if "reasoning_effort" in read else {})}

    def grammar(
        self, tools: ToolUse | None, asked: StructuredOutput | None, *, prompt_end: bytes
    ) -> StructuredOutput | None:
        """Return the grammar of the text. `asked` is the client's grammar for an answer.

        If a call is demanded, the grammar of calls replaces it. The model may reason first.
        """
        if tools is not None and (tools.choice == "required" or (asked is None and self._reads_calls)):
            grammar = self._syntax.grammar(tools)
            return grammar if grammar is None else self._after_reasoning(grammar, prompt_end)
        return asked if asked is None else self._after_reasoning(asked, prompt_end, opening=self._syntax.answer_opening)

    def _after_reasoning(self, grammar: StructuredOutput, prompt_end: bytes, opening: str = "") -> StructuredOutput:
        tags = self.reasoning_tags(prompt_end)
        if tags is None:
            return structs.replace(grammar, reasoning=None)
        closing = f"{tags[1]}{self._syntax.after_reasoning}"
        return structs.replace(grammar, reasoning=(tags[0], closing), answer_opening=opening)

    def reasoning_tags(self, prompt_end: bytes) -> tuple[str, str] | None:
        """Return the tags around the reasoning, the first "" if the prompt has it; None if the model cannot reason."""
        if self._reasoning is None or not self._syntax.begins_message(prompt_end.decode(errors="replace")):
            return None
        return "" if self._reasoning_is_open(prompt_end) else self._reasoning.opening, self._reasoning.closing

    def shown_special_tokens(self, tools: ToolUse | None) -> tuple[int, ...]:
        """Return the special tokens that the text must keep although others are left out: tags that are parsed."""
        return tuple(self._shown(tools).values())

    def message_format(
        self,
        tools: ToolUse | None,
        *,
        prompt_end: bytes,
        num_calls: int = 0,
        show_reasoning: bool = True,
        hide_special_tokens: bool = True,
    ) -> MessageFormat:
        """Return how to read the answer. `prompt_end` is the text of the prompt's last `PROMPT_TAIL` tokens,
        `num_calls` the number of calls in the conversation before."""
        tags = SpecialTags(self._shown(tools), shown=not hide_special_tokens)
        syntax = self._syntax
        reading = Reading(
            tools=tools if tools and self._reads(tools) else None,
            new_call_id=lambda name, index: syntax.new_call_id(name, num_calls + index),
            tags=tags,
            prompt_end=prompt_end.decode(errors="replace"),
            splits_reasoning=self._splits_reasoning,
        )
        finds_all = syntax.reads_reasoning
        return MessageFormat(
            reasoning=self._reasoning,
            reasoning_is_open=self._reasoning_is_open(prompt_end),
            show_reasoning=show_reasoning,
            new_tool_reader=syntax.reader(reading) if reading.tools or finds_all else None,
            call_is_demanded=tools is not None and tools.choice == "required",
            call_is_named=tools is not None and tools.named is not None,
            special_tags=tags,
            between_messages=syntax.after_reasoning if finds_all else "",
        )

    def _reasoning_is_open(self, prompt_end: bytes) -> bool:
        return self._reasoning is not None and prompt_end.rstrip().endswith(self._reasoning.opening.rstrip().encode())

    def _reads(self, tools: ToolUse) -> bool:
        return self._reads_calls or tools.choice == "required"

    def _shown(self, tools: ToolUse | None) -> dict[str, int]:
        reads = self._syntax.reads_reasoning or (tools and self._reads(tools))
        tags = [tag for tag in self._syntax.tags if tag in self._special_tokens] if reads else []
        return {**self._reasoning_tokens, **{tag: self._special_tokens[tag] for tag in tags}}


def abilities(template: str, special_tokens: Container[str]) -> dict[str, bool]:
    """Return whether a model with this chat template calls tools and thinks, without rendering the template."""
    syntax = syntax_of(template, special_tokens)
    reasoning = (syntax or DESCRIBED).reasoning or _reasoning_tags(template)
    return {"tools": syntax is not None or "tools" not in template, "thinking": reasoning is not None}


def _reasoning_tags(template: str) -> ReasoningTags | None:
    return next((tags for tags in (THINK, BRACKETS) if tags.closing in template), None)
