"""Conversations in the form that a chat template can show.

Rendering calls with random words shows once what a template shows (`find_form`): many templates drop calls, show one
call of several, or print an object of arguments as Python does. The syntax's record writes the missing parts into the
text. So the prompt has every call, result and text of a history.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from engine.errors import HeadraceError
from protocol.chat_template import ChatTemplate, Written, segments_text
from protocol.errors import ApiError
from protocol.syntax.record import Message, Syntax, json_of
from protocol.tools.kinds import INPUT, Function


@dataclass(frozen=True, kw_only=True)
class TemplateForm:
    """The features of a chat template: whether it shows tools, developers' messages, calls, results, and several calls
    in one message.

    With `text_arguments` it shows the arguments of calls if they are JSON text instead of an object; with
    `only_objects` it fails on text that is not JSON, which models write at times. With `splits_text` the text of a
    message with calls has to be a message of its own. `thoughts` says where it looks for reasoning instead of the usual
    fields: in the field `thinking` (LFM2.5), or in a part of the content (Mistral). `late_system` says where the text
    of system messages is shown that are not the first: in their place (""), or as the user's, or in the first.
    """

    declares_tools: bool = False
    knows_developer: bool = True
    shows_calls: bool = False
    takes_several: bool = False
    text_arguments: bool = False
    only_objects: bool = False
    splits_text: bool = False
    thoughts: Literal["", "field", "part"] = ""
    late_system: Literal["", "user", "first"] = ""


SYSTEM_ROLES = ("system", "developer")
_THOUGHTS = ("reasoning", "reasoning_content")  # names under which every message has its reasoning


def find_form(template: ChatTemplate, syntax: Syntax) -> TemplateForm:
    """Return the form of a template with this syntax, after rendering a few short conversations."""
    function = Function(name=_word(), description="Answers", parameters={"type": "object", "properties": {}})
    user: Message = {"role": "user", "content": "Hello"}

    def rendered(form: TemplateForm, messages: Sequence[Message]) -> str:
        tools = [function.for_template()] if form.declares_tools else None
        try:
            return segments_text(template.render(for_form(messages, form, syntax), tools=tools))
        except (HeadraceError, ApiError):
            return ""

    def show_thought(form: TemplateForm) -> bool:
        turn: Message = {"role": "assistant", "content": "Done", **dict.fromkeys(_THOUGHTS, thought := _word())}
        prompt = rendered(form, [user, turn])
        return thought in prompt and not any(quote + thought in prompt for quote in "'\"")  # a part as Python prints it

    def show_system(form: TemplateForm) -> bool:
        first, second, late = ({"role": "system", "content": _word()} for _ in range(3))
        answer = {"role": "assistant", "content": "Done"}
        prompt = rendered(form, [first, second, user, answer, late, user])
        return all(each["content"] in prompt for each in (first, second, late))

    def show(form: TemplateForm, text: str = "", *, num_calls: int = 1, is_json: bool = True) -> bool:
        """Return True if the template shows calls, results and this text in a conversation for `form`."""
        calls = [(_word(), _word(), _word(), _word()) for _ in range(num_calls)]  # id, argument, value and result
        written = [
            {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}
            for call_id, key, value, _ in calls
            for arguments in [{key: value} if is_json else f"{key} {value}"]
        ]
        results: list[Message] = [
            {"role": "tool", "content": result, "tool_call_id": call_id, "name": function.name}
            for call_id, _, _, result in calls
        ]
        turn: list[Message] = [{"role": "assistant", "content": text, "tool_calls": written}, *results]
        answered: list[Message] = [user, *turn, {"role": "assistant", "content": "Done"}, user]
        prompt = rendered(form, answered)
        if not all(word in prompt for call in calls for word in (*call[1:], text)):
            return False
        # Python's spelling of an object, or JSON in quotation marks: the model writes neither.
        return not any(f"'{key}'" in prompt or f'\\"{key}' in prompt for _, key, _, _ in calls)

    developer: Message = {"role": "developer", "content": _word()}
    form = TemplateForm(declares_tools=function.name in rendered(TemplateForm(declares_tools=True), [user]))
    form = replace(form, knows_developer=developer["content"] in rendered(form, [developer, user]))
    form = next(filter(show_thought, (replace(form, thoughts=kind) for kind in ("", "field", "part"))), form)
    form = next(filter(show_system, (replace(form, late_system=kind) for kind in ("", "user", "first"))), form)
    for text_arguments in (False, True):
        shown = replace(form, shows_calls=True, takes_several=True, text_arguments=text_arguments)
        if show(shown):
            shown = replace(shown, takes_several=show(shown, num_calls=2), only_objects=not show(shown, is_json=False))
            split = replace(shown, splits_text=True)
            return split if not show(shown, text := _word()) and show(split, text) else shown
    return form


def _word() -> str:
    return f"w{secrets.randbelow(10**8):08d}"  # Mistral's call ids must be nine letters and digits


def for_form(messages: Sequence[Message], form: TemplateForm, syntax: Syntax) -> list[Message]:
    """Return the conversation in the form that a template shows completely."""
    if not form.knows_developer:
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    shaped = with_known_ids(syntax.shape(messages), syntax)
    shaped = _with_calls(with_one_system(shaped, form) if form.late_system else shaped, form, syntax)
    return [_with_thought(message, form) for message in shaped] if form.thoughts else shaped


def _with_calls(messages: list[Message], form: TemplateForm, syntax: Syntax) -> list[Message]:
    if not form.shows_calls:
        return [_as_text(message, syntax) for message in messages]
    if form.splits_text:
        messages = text_before_calls(messages)
    if not form.takes_several:
        messages = one_call_each(messages)
    if form.text_arguments:
        return with_arguments(messages, json_of)
    return with_arguments(messages, _as_object) if form.only_objects else messages


def with_known_ids(messages: Sequence[Message], syntax: Syntax) -> list[Message]:
    """Return the messages with call ids that the family's templates accept; other models may have made the calls."""
    known = syntax.known_call_id
    if known is None:
        return list(messages)
    ids: dict[str, str] = {}
    numbers = count()

    def of_call(call: Mapping[str, Any]) -> dict[str, Any]:
        given = call.get("id", "")
        ids[given] = known(given, call["function"]["name"], next(numbers))
        return {**call, "id": ids[given]}

    shaped = []
    for message in messages:
        if calls := message.get("tool_calls"):
            shaped.append({**message, "tool_calls": [of_call(call) for call in calls]})
        elif (given := message.get("tool_call_id")) is not None:
            call_id = ids.get(given) or known(given, message.get("name", ""), next(numbers))
            shaped.append({**message, "tool_call_id": call_id})
        else:
            shaped.append(message)
    return shaped


def with_one_system(messages: Sequence[Message], form: TemplateForm) -> list[Message]:
    """Return the conversation with one system message, at the beginning; those after it are joined if they follow it
    at once or the form says so, and are the user's otherwise."""
    shaped: list[Message] = []
    for message in messages:
        if message["role"] not in SYSTEM_ROLES or not shaped:
            shaped.append(message)
        elif len(shaped) > 1 and form.late_system == "user":
            shaped.append({**message, "role": "user"})
        elif shaped[0]["role"] in SYSTEM_ROLES:
            text = "\n\n".join(content_text(each["content"]) for each in (shaped[0], message))
            shaped[0] = {**shaped[0], "content": text}
        else:
            shaped.insert(0, message)
    return shaped


def text_before_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the text of each message with calls in a message before it."""
    split: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and content_text(message["content"]):
            split += [{"role": message["role"], "content": message["content"]}, {**message, "content": ""}]
        else:
            split.append(message)
    return split


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with one call in each message, followed by its result."""
    split: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        end = place
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, place = list(messages[place:end]), end
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": message["role"], "content": ""}
            split.append({**first, "tool_calls": [call]})
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            if not own and results and "tool_call_id" not in results[0]:
                own = results[:1]
            split += own
            results = [each for each in results if each not in own]
        split += results
    return split


def with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with the arguments of calls changed."""

    def of_call(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [of_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {INPUT: arguments}


def _with_thought(message: Message, form: TemplateForm) -> Message:
    if (thought := message.get("reasoning")) is None:
        return message
    if form.thoughts == "field":
        return {**message, "thinking": thought}
    text = {"type": "text", "text": content_text(message["content"])}
    return {**message, "content": [{"type": "thinking", "thinking": thought}, text]}


def _as_text(message: Message, syntax: Syntax) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": syntax.write_result(content_text(message["content"]))}
    if calls := message.get("tool_calls"):
        content = content_text(message["content"])
        written = [syntax.write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        message = {**message, "content": Written.joined("\n", [*([content] if content else []), *written])}
        del message["tool_calls"]
    return message


def with_declaration(messages: Sequence[Message], functions: Sequence[Function], syntax: Syntax) -> list[Message]:
    """Return the conversation with a description of the functions in the system message."""
    if not functions:
        return list(messages)
    offer = syntax.declaration(functions)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        content = Written.joined("\n\n", [content_text(messages[0]["content"]), offer])
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": offer}, *messages]


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a message's content, which is a string or a list of parts of text and of thinking."""
    return content if isinstance(content, str) else "\n".join(part[part["type"]] for part in content)
