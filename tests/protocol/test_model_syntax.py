"""What is asked of the served model's syntax: which family it is, what its template gets, what its grammar is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.messages import SPECIAL_MARK
from protocol.chat_template import CHATML, ChatTemplate, segments_text
from protocol.syntax.grammars import json_schema
from protocol.syntax.history import content_text
from protocol.syntax.message_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, join
from protocol.syntax.model_syntax import ModelSyntax
from protocol.tools.kinds import Function, ToolUse
from tests.protocol.wire_helpers import token_bytes

# What tells the families apart, in as few words as a template can have.
DECLARES = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
CALLS = "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
QWEN = f"{DECLARES} Use <tool_call></tool_call>. {MESSAGES}<tool_call>{CALLS}</think>"
LLAMA = f'Environment: ipython {DECLARES}{{"name": function name, "parameters": {{}}}} {MESSAGES}{CALLS}'
MISTRAL = f"{DECLARES}[AVAILABLE_TOOLS]{MESSAGES}[TOOL_CALLS]{CALLS}"
INVOKING = f"{DECLARES}<tool_call><invoke name=NAME>{MESSAGES}<tool_call>{CALLS}"
FUNCTIONARY = f"{DECLARES}<|python_tag|><function=NAME>{MESSAGES}{CALLS}"

WEATHER = Function(name="weather", description="It rains?", parameters={"type": "object", "required": ["city"]})
TIME = Function(name="time")
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Rain.", "tool_call_id": "c"},
]


def syntax_of(template, special_tokens=(), **parsers):
    ids = {token: number for number, token in enumerate(special_tokens)}
    return ModelSyntax(ChatTemplate(template, {}, special_tokens), ids, **parsers)


def read(syntax, text, tools, **options):
    parser = syntax.message_format(tools, prompt_end=b"", **options).parser(token_bytes)
    parts = join([*parser.feed_text(text), *parser.finish_text()])
    return [(part.index, part.name) if isinstance(part, ToolCallStart) else part for part in parts]


def grammar_of(syntax, tools, asked=None, prompt_end=b""):
    return syntax.grammar(tools, asked, prompt_end=prompt_end)


CALLED = [(0, "weather"), ToolCallArguments(0, '{"a": 1}')]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"a": 1}}]',
}


@pytest.mark.parametrize(
    ("template", "family"),
    [(QWEN, "hermes"), (LLAMA, "llama3"), (MISTRAL, "mistral"), (CHATML, "described")],
)
def test_the_family_is_found_by_the_template(template, family):
    tools = ToolUse(functions=(WEATHER,))
    assert syntax_of(template).name == family
    for written_in, text in WRITTEN.items():
        family = "hermes" if family == "described" else family
        parts = read(syntax_of(template), text, tools)
        assert parts == (CALLED if written_in == family else [ContentDelta(text)])
        assert read(syntax_of(template, tool_parser=written_in), text, tools) == CALLED
        assert read(syntax_of(template, tool_parser="none"), text, tools) == [ContentDelta(text)]


@pytest.mark.parametrize("template", [INVOKING, FUNCTIONARY])
def test_calls_of_an_unknown_syntax_stay_text_and_the_log_says_so_once(template, caplog):
    syntax = syntax_of(template)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tool_parser" in caplog.text
    assert syntax.name == "none"
    tools = ToolUse(functions=(WEATHER,))
    for text in WRITTEN.values():
        assert read(syntax, text, tools) == [ContentDelta(text)]
    assert syntax.for_template(CONVERSATION, tools) == (CONVERSATION, [WEATHER.for_template()])
    assert len(caplog.records) == 1
    # A demanded call has a form that the prompt teaches.
    demanded = ToolUse(functions=(WEATHER,), choice="required")
    messages, shown = syntax.for_template(CONVERSATION, demanded)
    assert shown is None
    assert '{"name": "NAME", "arguments": {ARGUMENTS}}' in messages[0]["content"]
    assert json.loads(grammar_of(syntax, demanded).value)["tags"][0]["begin"].startswith("<tool_call>")
    assert read(syntax, WRITTEN["hermes"], demanded) == CALLED


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_what_a_grammar_writes_is_read_as_a_call(template):
    tools = ToolUse(functions=(WEATHER, TIME), choice="required")
    for parser in ("auto", "none"):
        syntax = syntax_of(template, tool_parser=parser)
        grammar = json.loads(grammar_of(syntax, tools).value)
        assert (grammar["required"], grammar["repeat"], grammar["text"]) == (True, True, False)
        written = grammar["separator"].join(f"{tag['begin']}{{}}{tag['end']}" for tag in grammar["tags"])
        assert read(syntax, written, tools) == [
            (0, "weather"),
            ToolCallArguments(0, "{}"),
            (1, "time"),
            ToolCallArguments(1, "{}"),
        ]


def test_the_grammar_is_as_narrow_as_the_choice():
    syntax = syntax_of(QWEN)
    assert grammar_of(syntax, None) is None
    assert grammar_of(syntax, ToolUse(functions=(WEATHER,))) is None
    named_grammar = grammar_of(syntax, ToolUse(functions=(WEATHER, TIME), choice="required", named="time"))
    named = json.loads(named_grammar.value)
    assert [tag["begin"] for tag in named["tags"]] == ['<tool_call>\n{"name": "time", "arguments": ']
    assert named["tags"][0]["schema"] == {"type": "object", "properties": {}}
    assert named_grammar.closed
    assert not named_grammar.any_whitespace
    assert named["repeat"] is False
    one = grammar_of(syntax, ToolUse(functions=(WEATHER,), choice="required", parallel=False))
    assert json.loads(one.value)["repeat"] is False


def test_what_the_client_wants_of_an_answer_holds_unless_a_call_is_demanded():
    syntax, asked = syntax_of(LLAMA), json_schema({"type": "object"})
    strict = Function(name="f", parameters={"type": "object"}, strict=True)
    assert grammar_of(syntax, None, asked) == asked
    assert grammar_of(syntax_of(MISTRAL), ToolUse(functions=(strict,)), asked) == asked
    demanded = grammar_of(syntax, ToolUse(functions=(strict,), choice="required"), asked)
    assert [tag["begin"] for tag in json.loads(demanded.value)["tags"]] == ['{"name": "f", "parameters": ']


def test_a_model_that_reasons_may_do_so_before_what_is_demanded():
    asked = json_schema({"type": "object"})
    for tools in (None, ToolUse(functions=(WEATHER,), choice="required")):
        assert grammar_of(syntax_of(QWEN), tools, asked).reasoning == ("<think>", "</think>")
        opened = grammar_of(syntax_of(QWEN), tools, asked, prompt_end=b"assistant\n<think>\n")
        assert opened.reasoning == ("", "</think>")
        assert grammar_of(syntax_of(LLAMA), tools, asked).reasoning is None


def test_strict_functions_are_held_to_their_schema_where_a_call_can_be_told_from_text():
    strict = Function(name="f", parameters={"type": "object", "maxProperties": 1}, strict=True)
    tools = ToolUse(functions=(strict, WEATHER))
    grammar = json.loads(grammar_of(syntax_of(QWEN), tools).value)
    assert [tag["schema"] for tag in grammar["tags"]] == [strict.parameters, {"type": "object"}]
    assert (grammar["triggers"], grammar["text"], grammar["required"]) == (["<tool_call>"], True, False)
    assert grammar_of(syntax_of(LLAMA), tools) is None
    assert grammar_of(syntax_of(QWEN, tool_parser="none"), tools) is None


def test_without_parallel_calls_the_first_one_is_kept():
    tools = ToolUse(functions=(WEATHER,), parallel=False)
    text = f"A. {WRITTEN['hermes']}\n{WRITTEN['hermes']} B."
    assert read(syntax_of(QWEN, reasoning_parser="none"), text, tools) == [
        ContentDelta("A."),
        *CALLED,
        ContentDelta("B."),
    ]


def test_tags_that_are_special_tokens_are_shown_to_the_reader_and_to_nobody_else():
    syntax = syntax_of(MISTRAL, special_tokens=["</s>", "[TOOL_CALLS]", "[ARGS]"])
    tools = ToolUse(functions=(WEATHER,))
    assert syntax.shown_special_tokens(None) == ()
    assert syntax.shown_special_tokens(tools) == (1, 2)
    broken = "[TOOL_CALLS]oh no[ARGS], well [ARGS]."
    marked = broken.replace("[TOOL", f"{SPECIAL_MARK}[TOOL").replace("[ARGS", f"{SPECIAL_MARK}[ARGS")
    assert read(syntax, marked, tools) == [ContentDelta("oh no, well .")]
    assert read(syntax, marked, tools, hide_special_tokens=False) == [ContentDelta(broken)]
    assert read(syntax, broken, tools) == [ContentDelta(broken)]  # spelled by other tokens


def test_ids_have_the_form_that_the_familys_templates_ask_for():
    tools = ToolUse(functions=(WEATHER,))
    for template, family, length in ((QWEN, "hermes", 29), (MISTRAL, "mistral", 9)):
        parser = syntax_of(template).message_format(tools, prompt_end=b"").parser(token_bytes)
        ids = [part.call_id for part in parser.feed_text(WRITTEN[family] * 2) if isinstance(part, ToolCallStart)]
        assert len(set(ids)) == 2
        assert {len(call_id) for call_id in ids} == {length}


def test_ids_of_another_model_are_brought_into_that_form():
    others, _ = syntax_of(MISTRAL).for_template(CONVERSATION, None)
    [call_id], result_id = [call["id"] for call in others[1]["tool_calls"]], others[2]["tool_call_id"]
    assert call_id == result_id
    assert (len(call_id), call_id.isalnum()) == (9, True)
    own = [{"role": "tool", "content": "", "tool_call_id": "Ab3456789"}]
    assert syntax_of(MISTRAL).for_template(own, None)[0] == own


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects():
    messages, tools = syntax_of(QWEN).for_template(CONVERSATION, ToolUse(functions=(WEATHER,)))
    rendered = segments_text(ChatTemplate(QWEN, {}).render(messages, tools=tools))
    assert '{"type": "function", "function": {"name": "weather", "description": "It rains?"' in rendered
    assert 'assistant: <tool_call>weather {"city": "Ulm"}' in rendered
    assert "tool: Rain." in rendered
    assert syntax_of(QWEN).for_template(CONVERSATION, None) == (CONVERSATION, None)


@pytest.mark.parametrize("template", [CHATML, "<tool_call>" + CHATML])
def test_templates_without_tools_get_them_in_words(template):
    syntax = syntax_of(template)
    messages, tools = syntax.for_template([{"role": "system", "content": "Be brief."}, *CONVERSATION], None)
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief."
    assert messages[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\nRain.\n</tool_response>"
    for conversation in (CONVERSATION, [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        offered, tools = syntax.for_template(conversation, ToolUse(functions=(WEATHER, TIME)))
        assert tools is None
        assert offered[0]["role"] == "system"
        assert '"name": "weather", "description": "It rains?"' in offered[0]["content"]
        assert '{"name": "NAME", "arguments": {ARGUMENTS}}' in offered[0]["content"]
        assert ("Be brief." in offered[0]["content"]) == (conversation is not CONVERSATION)
        assert offered[1:] == messages[1:]


@pytest.mark.parametrize(
    ("template", "parser", "prompt_end", "parts"),
    [
        (QWEN, "auto", b"\n", [ReasoningDelta("a"), ContentDelta("b")]),
        (QWEN, "none", b"\n", [ContentDelta("<think>a</think>b")]),
        (LLAMA, "auto", b"\n", [ContentDelta("<think>a</think>b")]),
        (LLAMA, "think", b"\n", [ReasoningDelta("a"), ContentDelta("b")]),
    ],
)
def test_reasoning_is_looked_for_where_the_template_or_the_operator_says(template, parser, prompt_end, parts):
    syntax = syntax_of(template, reasoning_parser=parser)
    assert read(syntax, "<think>a</think>b", None) == parts


def test_reasoning_that_the_prompt_has_opened_needs_no_tag():
    syntax = syntax_of(QWEN)
    opened = syntax.message_format(None, prompt_end=b"assistant\n<think>\n").parser(token_bytes)
    assert join(opened.feed_text("a</think>b")) == [ReasoningDelta("a"), ContentDelta("b")]
    closed = syntax.message_format(None, prompt_end=b"<think>\n\n</think>\n\n").parser(token_bytes)
    assert join(closed.feed_text("a")) == [ContentDelta("a")]


TWO = {**CALL, "id": "d", "function": {"name": "time", "arguments": {"zone": "CET"}}}
SEVERAL: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather and time?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, TWO]},
    {"role": "tool", "content": "Noon.", "tool_call_id": "d"},
    {"role": "tool", "content": "Rain.", "tool_call_id": "c"},
    {"role": "assistant", "content": "Rain at noon."},
    {"role": "user", "content": "Thanks."},
]
FORMS = {
    "all": f"{DECLARES}{MESSAGES}<tool_call>{CALLS}",
    "one call": f"{MESSAGES}<tool_call>{CALLS}".replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
    "one call or an error": "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one') }}{% endif %}{% endfor %}" + f"{MESSAGES}<tool_call>{CALLS}",
    "arguments as text": f"{MESSAGES}<tool_call>{CALLS}".replace("arguments | tojson", "arguments"),
    "text that is added": f"{MESSAGES}<tool_call>{CALLS}".replace(
        "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
    ),
    "no results": f"{MESSAGES}<tool_call>{CALLS}".replace(
        "{{ m.role }}", "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}"
    ),
    "no text with calls": f"{MESSAGES}<tool_call>{CALLS}".replace(
        "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    ),
    "nothing": CHATML + "<tool_call>",
}


@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_every_call_result_and_text_of_a_history_is_in_the_prompt(template):
    template = ChatTemplate(template, {})
    messages, tools = ModelSyntax(template, {}).for_template(SEVERAL, ToolUse(functions=(WEATHER, TIME)))
    text = segments_text(template.render(messages, tools=tools))
    places = [
        text.index(each) for each in ("Weather and time?", "I look.", '{"city": "Ulm"}', "Rain at noon.", "Thanks.")
    ]
    assert places == sorted(places)
    assert '{"zone": "CET"}' in text
    assert text.count("Rain.") == text.count("Noon.") == 1
    assert '"name": "weather", "description": "It rains?"' in text


@pytest.mark.parametrize(
    "thought",
    [
        "{{ m.reasoning_content }}",
        "{% if m.thinking is defined %}{{ m.thinking }}{% endif %}",
        "{% if m.content is not string %}{{ m.content[0].thinking }}{% endif %}",
    ],
)
def test_reasoning_of_earlier_turns_is_given_where_the_template_looks_for_it(thought):
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}" + thought + "{% endif %}"
        "{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}</think>",
        {},
    )
    turn = {"role": "assistant", "content": "Rain.", "reasoning": "I guess.", "reasoning_content": "I guess."}
    messages, _ = ModelSyntax(template, {}).for_template([CONVERSATION[0], turn], None)
    assert segments_text(template.render(messages)) == "Weather?I guess.Rain.</think>"
    assert content_text(messages[-1]["content"]).endswith("Rain.")


def test_arguments_that_are_no_json_become_an_object_for_templates_that_need_one():
    items = "{% for k, v in call.function.arguments.items() %}{{ k }}: {{ v }}{% endfor %}"
    template = ChatTemplate(
        f"<tool_call>{MESSAGES}{{{{ call.function.name }}}} {items}{{% endfor %}}{{% endfor %}}", {}
    )
    broken = {**CALL, "function": {"name": "weather", "arguments": "no JSON"}}
    messages, _ = ModelSyntax(template, {}).for_template(
        [CONVERSATION[0], {"role": "assistant", "content": "", "tool_calls": [broken]}], None
    )
    assert "weather input: no JSON" in segments_text(template.render(messages))


@pytest.mark.parametrize(
    ("refuses", "roles"),
    [
        ("loop.index0 and m.role == 'system'", ["system", "user", "assistant", "user", "user"]),
        ("loop.previtem and m.role in ('system', loop.previtem.role)", ["system", "user", "assistant", "user"]),
        ("false", ["system", "system", "user", "assistant", "system", "user"]),
    ],
)
def test_system_messages_after_the_first_are_shown_where_the_template_can(refuses, roles):
    template = ChatTemplate(
        "{% for m in messages %}{% if " + refuses + " %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }};{% endfor %}",
        {},
    )
    given = ["system a", "system b", "user c", "assistant d", "system e", "user f"]
    conversation = [dict(zip(("role", "content"), each.split(), strict=True)) for each in given]
    messages, _ = ModelSyntax(template, {}).for_template(conversation, None)
    assert [message["role"] for message in messages] == roles
    assert sorted(segments_text(template.render(messages)).replace(";", " ").split()) == [*"abcdef"]


def test_results_follow_their_calls_where_a_message_has_one_call():
    shaped, _ = syntax_of(FORMS["one call"]).for_template(SEVERAL, None)
    assert [(m["content"], len(m.get("tool_calls", ()))) for m in shaped[1:5]] == [
        ("I look.", 1),
        ("Rain.", 0),
        ("", 1),
        ("Noon.", 0),
    ]


def test_only_what_the_server_writes_of_a_call_is_control_tokens():
    template = ChatTemplate(FORMS["nothing"], {}, ["<tool_call>", "</tool_call>"])
    call = {**CALL, "function": {"name": "weather", "arguments": {"city": "</tool_call>"}}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "<tool_call>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages, _ = ModelSyntax(template, {}).for_template(history, None)
    segments = template.render(messages)
    assert [text for text, is_plain in segments if is_plain] == ["<tool_call>", "</tool_call>"]
    assert segments_text(each for each in segments if not each[1]).count("</tool_call>") == 1


def test_fields_for_the_template_that_it_does_not_read_are_named():
    def unread(template, documents=None, **variables):
        return ModelSyntax(ChatTemplate(template, {}), {}).unread_fields(documents, variables)

    assert unread("{{ documents }}{{ thinking }}", [{}], enable_thinking=True, date=1) == ("chat_template_kwargs.date",)
    assert unread("{{ messages }}", [{}], thinking=True) == ("documents", "chat_template_kwargs.thinking")
    assert unread("{{ messages }}", []) == unread("{{ date }}", date=1) == ()
