"""The syntaxes of all families but gpt-oss: each with its special tokens and a small template.

For every family a seeded grammar writes answers: reasoning, text, one call or several, nested values, strings that look
like markup. Each is read whole and cut into pieces at random, whole and damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from engine.detokenizer import Vocabulary
from engine.messages import SPECIAL_MARK
from engine.structured.compiler import GrammarCompiler
from protocol.chat_template import ChatTemplate, segments_text
from protocol.syntax.message_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, join
from protocol.syntax.model_syntax import ModelSyntax
from protocol.syntax.parameter_calls import json_value, types_of
from protocol.syntax.registry import SYNTAXES
from protocol.tools.kinds import CustomTool, Function, ToolUse
from tests.engine.helpers import byte_level_tokenizer, id_of
from tests.protocol.wire_helpers import token_bytes

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
SEND = Function(name="send_it", description="Sends.", parameters={"type": "object", "properties": PROPERTIES})
TIME = Function(name="time.v2-b", description="Says it.")
TOOLS = ToolUse(functions=(SEND, TIME))
STRINGS = [
    "Ulm",
    "",
    "12",
    "null",
    "True",
    '{"a": 1}',
    "[1",
    'say "hi" \\ \t',
    "line\nline\n\n  indented",
    "  padded ",
    "<b>x</b> </x> <parameter",
    "水 👩‍🚀",
    "it's, isn't: {it}",
]
PIECES = [
    *"abXYZ019 \n\t\"\\'{}[]():;,.=<>/`&%#|",
    *("</", "<b>", "```", "{{", "%}", "\\n", "\\u00e9", "&lt;", "\r\n", "\x00", "\x7f", "\u2028", "\u00a0", "\ufeff"),
    *("é", "e\u0301", "水", "שלום", "👩‍🚀", "\U0001f1e9", "null", "True", "-1e5"),
]


def some_text(random: Random) -> str:
    return random.choice(STRINGS) if random.random() < 0.3 else "".join(random.choices(PIECES, k=random.randrange(12)))


def some_words(random: Random) -> str:
    """Text that begins with a letter, so that it cannot be anything else, and has no space around it."""
    return f"Say {some_text(random)}.".replace("[", "(").replace("{", "(")


def some_json(random: Random, depth: int = 0, any_key: bool = True) -> Any:
    kind = random.randrange(7 if depth < 3 else 5)
    if kind < 5:
        numbers = random.choice([0, -7, 10**12, 2**70, 1.5, -2e-3, 1e22, 5e-324])
        return [None, True, False, numbers, some_text(random)][kind]
    values = [some_json(random, depth + 1, any_key) for _ in range(random.randrange(4))]
    keys = some_text if any_key else (lambda random: random.choice(["k", "key_2", "a-b"]))
    return values if kind == 5 else {keys(random): value for value in values}


def some_value(random: Random, key: str, any_key: bool) -> Any:
    """A value of the property with this name; "undeclared" is none of the schema's."""
    match key:
        case "s":
            return some_text(random)
        case "n":
            return random.choice([0, -7, 10**12, 2**70])
        case "x":
            return random.choice([1.5, -2e-3, 3, 1e22, 5e-324])
        case "b":
            return random.random() < 0.5
        case "e":
            return random.choice([None, some_words(random)])
        case "o":
            return {"k": some_json(random, 1, any_key)} if random.random() < 0.8 else {}
        case "a":
            return [some_json(random, 1, any_key) for _ in range(random.randrange(3))]
    value = some_json(random, 0, any_key)
    return some_words(random) if isinstance(value, str) else value


@dataclass(frozen=True)
class Family:
    """What a family's models write. `template` has the words that tell it, `special` its special tokens."""

    template: str
    write: Callable[[Sequence[tuple[str, dict[str, Any]]]], str]
    special: tuple[str, ...] = ()
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    typed: bool = True  # values are plain text, which the schema gives types
    any_name: bool = True  # also functions that were not offered are called
    any_key: bool = True  # keys inside of values are quoted


def messages(call: str, *, calls: tuple[str, ...] = ("", ""), result: str = "{{ m.content }}", tools: str = "") -> str:
    """A template that shows messages as `role: content`, and calls as `call` says."""
    return (
        (tools or "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}")
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + result
        + "{% else %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}"
        + calls[0]
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% endfor %}"
        + calls[1]
        + "{% endif %}{% endif %}\n{% endfor %}assistant: "
    )


class Arguments(dict[str, Any]):
    """Arguments of a call, with options of `json.dumps`."""

    options: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed


def plain(value: Any) -> str:
    options = value.options if isinstance(value, Arguments) else {}
    return value if isinstance(value, str) else json.dumps(value, **{"ensure_ascii": False} | options)


def in_parameters(
    block: tuple[str, str], name: tuple[str, str], key: tuple[str, str], value: tuple[str, str], end: str, *, each: bool
) -> Callable[[Sequence[tuple[str, dict[str, Any]]]], str]:
    def call(called: tuple[str, dict[str, Any]]) -> str:
        inside = "".join(f"{key[0]}{k}{key[1]}{value[0]}{plain(v)}{value[1]}" for k, v in called[1].items())
        return f"{name[0]}{called[0]}{name[1]}{inside}{end}"

    if each:
        return lambda calls: "\n".join(f"{block[0]}{call(one)}{block[1]}" for one in calls)
    return lambda calls: block[0] + "\n".join(map(call, calls)) + block[1]


ARGUMENTS = "{% for k, v in f.arguments.items() %}"
PLAIN = "{{ v if v is string else v | tojson }}"
XML = (
    "<tool_call>\n<function={{ f.name }}>\n"
    + ARGUMENTS
    + f"<parameter={{{{ k }}}}>\n{PLAIN}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>"
)
FAMILIES = {
    "qwen3_coder": Family(
        messages(XML) + "</think>",
        in_parameters(
            ("<tool_call>\n", "\n</tool_call>"),
            ("<function=", ">\n"),
            ("<parameter=", ">"),
            ("\n", "\n</parameter>\n"),
            "</function>",
            each=True,
        ),
    ),
    "seed_oss": Family(
        messages(XML.replace("tool_call>", "seed:tool_call>").replace(f"\n{PLAIN}\n", PLAIN)),
        in_parameters(
            ("<seed:tool_call>\n", "\n</seed:tool_call>"),
            ("<function=", ">\n"),
            ("<parameter=", ">"),
            ("", "</parameter>\n"),
            "</function>",
            each=True,
        ),
        think=("<seed:think>", "</seed:think>"),
        special=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    ),
    "glm": Family(
        messages(
            "\n<tool_call>{{ f.name }}\n"
            + ARGUMENTS
            + f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{PLAIN}</arg_value>\n{{% endfor %}}</tool_call>"
        )
        + "</think>",
        in_parameters(
            ("\n<tool_call>", "</tool_call>"),
            ("", "\n"),
            ("<arg_key>", "</arg_key>\n"),
            ("<arg_value>", "</arg_value>\n"),
            "",
            each=True,
        ),
        special=("<|observation|>", "<|user|>"),
    ),
    "minimax": Family(
        messages(
            '<invoke name="{{ f.name }}">'
            + ARGUMENTS
            + f'<parameter name="{{{{ k }}}}">{PLAIN}</parameter>{{% endfor %}}</invoke>\n',
            calls=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        )
        + "</think>",
        in_parameters(
            ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            ('<invoke name="', '">\n'),
            ('<parameter name="', '">'),
            ("", "</parameter>\n"),
            "</invoke>",
            each=False,
        ),
        special=("<minimax:tool_call>", "</minimax:tool_call>", "[e~["),
    ),
}
TAGGED = {  # DeepSeek V3.2 and 4 say of each value whether it is a string
    "deepseek_v32": "function_calls",
    "deepseek_v4": "tool_calls",
}


def dsml(block: str) -> Callable[[Sequence[tuple[str, dict[str, Any]]]], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
            f"{plain(v)}</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'

    return lambda calls: f"\n\n<｜DSML｜{block}>\n{''.join(call(*one) for one in calls)}</｜DSML｜{block}>"


FAMILIES |= {
    name: Family(
        messages(
            '<｜DSML｜invoke name="{{ f.name }}">'
            + ARGUMENTS
            + f'<｜DSML｜parameter name="{{{{ k }}}}">{PLAIN}</｜DSML｜parameter>{{% endfor %}}</｜DSML｜invoke>',
            calls=(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"),
        )
        + "</think>",
        dsml(block),
        typed=False,
    )
    for name, block in TAGGED.items()
}


def in_sections(
    section: tuple[str, ...], call: tuple[str, str, str, str]
) -> Callable[[Sequence[tuple[str, dict[str, Any]]]], str]:
    """Calls of JSON: `call` is the text before the name, before and behind the arguments, and between two calls."""
    return lambda calls: (
        section[0]
        + call[3].join(f"{call[0]}{name}{call[1]}{plain(arguments)}{call[2]}" for name, arguments in calls)
        + section[1]
    )


def in_json(
    section: tuple[str, ...], call: tuple[str, str, str, str]
) -> tuple[str, Callable[[Sequence[tuple[str, dict[str, Any]]]], str]]:
    template = messages(f"{call[0]}{{{{ f.name }}}}{call[1]}{{{{ f.arguments | tojson }}}}{call[2]}", calls=section)
    return template, in_sections(section, call)


DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI = tuple(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end"))
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
PHI = ("<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|/tool|>")
for name, template, write, special in (
    (
        "deepseek_v3",
        *in_json(DEEPSEEK[:2], (f"{DEEPSEEK[2]}function{DEEPSEEK[4]}", "\n```json\n", f"\n```{DEEPSEEK[3]}", "\n")),
        DEEPSEEK,
    ),
    ("deepseek_v31", *in_json(DEEPSEEK[:2], (DEEPSEEK[2], DEEPSEEK[4], DEEPSEEK[3], "")), ()),
    (
        "kimi_k2",
        *in_json(KIMI[:2], (f"{KIMI[2]}functions.", f":7{KIMI_ARGUMENTS}", KIMI[3], "")),
        (*KIMI, KIMI_ARGUMENTS),
    ),
    (
        "hermes",
        *in_json(("", ""), ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")),
        (),
    ),
    (
        "llama3",
        *in_json(("<|python_tag|>", ""), ('{"name": "', '", "parameters": ', "}", "; ")),
        ("<|python_tag|>",),
    ),
    (
        "mistral",
        *in_json(("[TOOL_CALLS][", "]"), ('{"name": "', '", "arguments": ', "}", ", ")),
        ("[TOOL_CALLS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    (
        "granite",
        *in_json(("<|tool_call|>[", "]"), ('{"name": "', '", "arguments": ', "}", ", ")),
        ("<|tool_call|>", "<|end_of_text|>"),
    ),
    (
        "phi4_mini",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}",
        in_sections((f"{PHI[0]}[", f"]{PHI[1]}"), ('{"name": "', '", "arguments": ', "}", ", ")),
        PHI,
    ),
    (
        "mistral_v11",
        *in_json(("", ""), ("[TOOL_CALLS]", "[ARGS]", "", "")),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
):
    FAMILIES[name] = Family(template, write, special, typed=False)
for name in ("mistral", "mistral_v11"):
    FAMILIES[name] = replace(
        FAMILIES[name], template=f"[/THINK]{FAMILIES[name].template}", think=("[THINK]", "[/THINK]")
    )
FAMILIES["hermes"] = replace(FAMILIES["hermes"], template=f"{FAMILIES['hermes'].template}</think>")
FAMILIES["llama3"] = replace(FAMILIES["llama3"], any_name=False)


def gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


GEMMA = """\
{%- macro show(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is mapping -%}
{{ '{' }}{% for k in v %}{{ k }}:{{ show(v[k]) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif v is sequence -%}[{% for each in v %}{{ show(each) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
"""
FAMILIES["gemma4"] = Family(
    GEMMA + messages("<|tool_call>call:{{ f.name }}{{ show(f.arguments) }}<tool_call|>"),
    lambda calls: "".join(f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>" for name, arguments in calls),
    ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>"),
    think=("<|channel>thought\n", "<channel|>"),
    typed=False,
    any_key=False,
)


def python(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


FAMILIES["lfm2"] = Family(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>",
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    typed=False,
)
FAMILIES["pythonic"] = Family(
    messages(
        "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}",
        calls=("<|python_start|>[", "]<|python_end|>"),
    )
    + "func_name1(",
    lambda calls: f"<|python_start|>{python(calls)}<|python_end|>",
    ("<|python_start|>", "<|python_end|>"),
    typed=False,
    any_name=False,
)


def template_of(family: Family) -> ChatTemplate:
    return ChatTemplate(family.template, {}, family.special)


IDS = {name: {token: number for number, token in enumerate(family.special)} for name, family in FAMILIES.items()}
MODELS = {name: ModelSyntax(template_of(family), IDS[name]) for name, family in FAMILIES.items()}


def read(
    name: str, text: str, *, random: Random | None = None, tools: ToolUse | None = TOOLS, prompt_end: bytes = b""
) -> tuple[list[Any], frozenset[int]]:
    """The parts of a text, calls with their arguments, and the indices of the cut calls."""
    parser = MODELS[name].message_format(tools, prompt_end=prompt_end).parser(token_bytes)
    for token in sorted(FAMILIES[name].special, key=len):
        text = text.replace(token, SPECIAL_MARK + token)
    pieces = [text]
    if random is not None:
        places = sorted(random.choices(range(len(text) + 1), k=random.randrange(1, 2 + min(len(text), 60))))
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    parts = join([part for piece in pieces for part in parser.feed_text(piece)] + parser.finish_text())
    return [part.name if isinstance(part, ToolCallStart) else part for part in parts], frozenset(parser.cut_calls)


def valued(parts: list[Any]) -> list[Any]:
    return [json.loads(part.fragment) if isinstance(part, ToolCallArguments) else part for part in parts]


def constructed(name: str, seed: int) -> tuple[str, list[Any]]:
    """An answer that a seeded grammar writes, and its parts."""
    random, family = Random(seed), FAMILIES[name]
    text, parts = "", list[Any]()

    def calls(count: int) -> str:
        called = []
        for _ in range(count):
            function = random.choice(["send_it", "send_it", "time.v2-b", "other_one" if family.any_name else "send_it"])
            keys = random.sample([*PROPERTIES, "undeclared"], k=random.randrange(5))
            if family.typed and function != "send_it":  # nothing has a type: what looks like JSON is JSON
                keys = [key for key in keys if key not in ("s", "e")]
            arguments = Arguments({key: some_value(random, key, family.any_key) for key in keys})
            arguments.options = {"ensure_ascii": random.random() < 0.5, "indent": random.choice([None, 1])}
            called.append((function, arguments))
            parts.extend([function, arguments])
        return family.write(called)

    if MODELS[name].reasoning_tags(b"") and random.random() < 0.5:
        thought = random.choice(["Two calls.", some_words(random), family.write([("send_it", {"s": "x"})]).strip()])
        text += f"{family.think[0]}{thought}{family.think[1]}"
        parts.append(ReasoningDelta(shown(name, thought)))
    for _ in range(random.choice([1, 1, 1, 2])):
        if random.random() < 0.6 or (parts and isinstance(parts[-1], dict)):
            parts.append(ContentDelta(words := some_words(random)))
            text += words
        text += calls(random.randrange(1, 4))
    if random.random() < 0.3:
        parts.append(ContentDelta(words := some_words(random)))
        text += f"\n\n{words}"
    return text, parts


def shown(name: str, text: str) -> str:
    """The text as clients get it, without special tokens."""
    for token in FAMILIES[name].special:
        text = text.replace(token, "")
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_found_by_the_words_of_its_template(name: str) -> None:
    assert MODELS[name].name == name


def check_constructed(name: str, *, seeds: range, num_cuttings: int) -> None:
    for seed in seeds:
        text, parts = constructed(name, seed)
        whole = read(name, text)
        assert (valued(whole[0]), whole[1]) == (parts, frozenset()), text
        for number in range(num_cuttings):
            assert read(name, text, random=Random(100 * seed + number)) == whole, text


def damaged(name: str, random: Random) -> tuple[str, list[str]]:
    """An answer with two blocks of calls that was changed in a few places, and the words that it has left."""
    family = FAMILIES[name]
    words = [f"w{number:03d}" for number in range(14)]
    called = words[1] if family.any_name else "time.v2-b"
    values = {"s": f"{words[2]} {words[3]}", "o": {"k": words[4]}, "undeclared": words[5], "a": [words[6], [words[7]]]}
    calls = [family.write([(called, {}), ("send_it", values)])]
    calls.append(family.write([("send_it", {"s": words[8], "e": f"{words[9]}\n{words[10]}"})]))
    text = f"{words[0]} {calls[0]} {words[11]}\n{calls[1]} {words[12]}"
    if MODELS[name].reasoning_tags(b"") and random.random() < 0.3:
        text = f"{family.think[0]}{words[13]}{family.think[1]}{text}"
    for _ in range(random.randrange(1, 4)):
        start, place = sorted(random.choices(range(len(text)), k=2))
        match random.randrange(5):
            case 0 | 1:
                tag = random.choice([*SYNTAXES[name].tags, *"{}[]()<>\"'\\\n:, x"])
                text = f"{text[:place]}{tag}{text[place:]}"
            case 2 if text[place] not in "w0123456789":
                text = text[:place] + text[place + 1 :]
            case 3:
                text = text[:place] + text[start : min(place, start + random.choice([12, 1000]))] + text[place:]
            case _:
                text = text[: max(place, 10)]
    return text, [word for word in words for _ in range(text.count(word))]


def check_damaged(name: str, *, seeds: range) -> None:
    for seed in seeds:
        text, words = damaged(name, random := Random(seed))
        whole = read(name, text)
        found = str(whole[0])
        assert [word for word in words if found.count(word) < words.count(word)] == [], text
        assert read(name, text, random=random) == whole, text


@pytest.mark.parametrize("name", FAMILIES)
def test_constructed_answers_are_read_the_same_however_they_are_cut(name: str) -> None:
    check_constructed(name, seeds=range(12), num_cuttings=2)  # all of them are in tests/integration/templates


@pytest.mark.parametrize("name", FAMILIES)
def test_no_word_of_a_damaged_answer_is_lost_and_no_cutting_changes_it(name: str) -> None:
    check_damaged(name, seeds=range(25))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_without_its_end_is_cut_and_one_without_a_whole_name_is_text(name: str) -> None:
    written = FAMILIES[name].write([("send_it", {"s": "Ulm", "n": 5})])
    start = written.index("send_it")
    assert read(name, written)[1] == frozenset()
    for end in range(start + 1, len(written)):
        parts, cut = read(name, written[:end])
        called = "send_it" in parts
        assert not called or cut == {0} or valued(parts)[1] == {"s": "Ulm", "n": 5}
        assert called or shown(name, written[:end]).strip() in "".join(part.text for part in parts)
    assert [part for part in read(name, written[: start + 3])[0] if not isinstance(part, ContentDelta)] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_free_text_of_a_custom_tool_arrives_as_text(name: str) -> None:
    tools = ToolUse(functions=(CustomTool(name="patch"),))
    for text in ("a\n+b\n", '{"x": 1}', "12", 'say "hi"'):
        parts, cut = read(name, FAMILIES[name].write([("patch", {"input": text})]), tools=tools)
        assert ([getattr(part, "fragment", part) for part in parts], cut) == (["patch", text], frozenset())


def turns(random: Random) -> list[dict[str, Any]]:
    def called(call_id: str, function: str, **arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}

    return [
        {"role": "user", "content": "First?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                called("call_a", "send_it", s='Ulm "Mitte"\nnorth', o={"deep": [1, "CET"]}),
                called("call_b", "time.v2-b", zone=random.choice(["CET", "UTC"])),
            ],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_a", "name": "send_it"},
        {"role": "tool", "content": "Noon.", "tool_call_id": "call_b", "name": "time.v2-b"},
        {"role": "assistant", "content": "Rain at noon."},
        {"role": "user", "content": "Then?"},
        {"role": "assistant", "content": "", "tool_calls": [called("call_c", "send_it", s="Bonn")]},
        {"role": "tool", "content": "Sun.", "tool_call_id": "call_c", "name": "send_it"},
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_of_calls_are_shown_to_the_model_in_order_and_read_back(name: str) -> None:
    shown_messages, tools = MODELS[name].for_template(turns(Random(0)), TOOLS)
    prompt = segments_text(template_of(FAMILIES[name]).render(shown_messages, tools=tools))
    words = ["First?", "I look.", "Mitte", "north", "deep", "Rain.", "Noon.", "Rain at noon.", "Then?", "Bonn", "Sun."]
    places = [prompt.index(word) for word in words if word != "Noon."]
    assert places == sorted(places)
    assert all(word in prompt for word in ("Noon.", "time.v2-b", "CET", "Sends."))
    start = prompt.index("I look.") + len("I look.")
    replayed = read(name, prompt[start : prompt.index("Rain.")].split("tool:")[0])[0]
    assert valued(replayed)[:2] == ["send_it", {"s": 'Ulm "Mitte"\nnorth', "o": {"deep": [1, "CET"]}}]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("arguments", ["city is Ulm", "[1, 2]", {"not a name": "x"}])
def test_arguments_that_are_no_object_of_names_are_shown_too(name: str, arguments: Any) -> None:
    messages = turns(Random(0))
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    shown_messages, tools = MODELS[name].for_template(messages, TOOLS)
    prompt = segments_text(template_of(FAMILIES[name]).render(shown_messages, tools=tools))
    assert (arguments if isinstance(arguments, str) else "not a name") in prompt
    assert all(word in prompt for word in ("time.v2-b", "Bonn", "Sun."))


TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens(sorted({token for family in FAMILIES.values() for token in family.special} | {"<eos>"}))
VOCABULARY = Vocabulary(TOKENIZER)
COMPILER = GrammarCompiler(
    VOCABULARY, vocab_size=TOKENIZER.get_vocab_size(), eos_token_ids=(id_of(TOKENIZER, "<eos>"),)
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_demanded_call_is_enforced_and_read(name: str) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    demanded = ToolUse(functions=(Function(name="send_it", parameters=schema),), choice="required", named="send_it")
    grammar = MODELS[name].grammar(demanded, None, prompt_end=b"")
    assert grammar is not None
    [tag] = json.loads(grammar.value)["tags"]
    written = f'{tag["begin"]}{{"s":"a \\"b\\" {{c}}"}}{tag["end"]}'
    matcher = COMPILER.compile(grammar).matcher()
    tokens = TOKENIZER.encode(written, add_special_tokens=False).ids
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    parts, cut = read(name, written, tools=demanded)
    assert (valued(parts), cut) == (["send_it", {"s": 'a "b" {c}'}], frozenset())


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("null", {"type": "string"}, "null"),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, 12.5),
        ("twelve", {"type": "integer"}, "twelve"),
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"type": ["boolean", "null"]}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"const": 1}, 1),
        ("{'a': True, 'b': (1, None)}", {"type": "object"}, {"a": True, "b": [1, None]}),
        ('[1, "x"]', {"type": "array"}, [1, "x"]),
        ("[1, ", {"type": "array"}, "[1, "),
        ("NaN", {}, "NaN"),
        (" 12 ", {}, 12),
        (" word ", {}, " word "),
        ("True", {}, "True"),
        ("12", {"type": 7, "enum": None}, 12),
        ("12", True, 12),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("['a\\[']", {"type": "array"}, ["a\\["]),
        ("1" * 5000, {}, "1" * 5000),
    ],
)
def test_a_value_gets_the_type_that_its_schema_gives_it(text: str, schema: Any, value: Any) -> None:
    assert json.loads(json_value(text, types_of(schema))) == value


def test_kimis_ids_count_the_calls_of_the_whole_conversation() -> None:
    text = FAMILIES["kimi_k2"].write([("send_it", {}), ("send_it", {})])
    parser = MODELS["kimi_k2"].message_format(TOOLS, prompt_end=b"", num_calls=3).parser(token_bytes)
    for token in (*KIMI, KIMI_ARGUMENTS):
        text = text.replace(token, SPECIAL_MARK + token)
    ids = [part.call_id for part in parser.feed_text(text) if isinstance(part, ToolCallStart)]
    assert ids == ["functions.send_it:3", "functions.send_it:4"]
    replayed, _ = MODELS["kimi_k2"].for_template(turns(Random(0)), TOOLS)
    of_calls = [call["id"] for message in replayed for call in message.get("tool_calls", ())]
    assert of_calls == ["functions.send_it:0", "functions.time.v2-b:1", "functions.send_it:2"]
    assert [message["tool_call_id"] for message in replayed if message["role"] == "tool"] == of_calls


def test_phi_gets_its_tools_between_its_own_tags() -> None:
    shown_messages, tools = MODELS["phi4_mini"].for_template(turns(Random(0)), TOOLS)
    segments = template_of(FAMILIES["phi4_mini"]).render(shown_messages, tools=tools)
    assert tools is None
    assert segments_text(segments).startswith('<|system|><|tool|>[{"name": "send_it", "description": "Sends."')
    assert all(not is_plain for _, is_plain in segments)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[send_it(s='a')]", ["send_it", {"s": "a"}]),
        (" [send_it(b=true, e=null), time.v2-b()]", ["send_it", {"b": True, "e": None}, "time.v2-b", {}]),
        ("[send_it(s='two\nlines')] Done.", ["send_it", {"s": "two\nlines"}, ContentDelta("Done.")]),
        ('[{"name": "send_it", "arguments": {}}]', ["send_it", {}]),
        ("[1, 2]", [ContentDelta("[1, 2]")]),
        ("[]", [ContentDelta("[]")]),
        ('[{"name": "Ada"}]', [ContentDelta('[{"name": "Ada"}]')]),
        ("[other(s='a')]", [ContentDelta("[other(s='a')]")]),
        ("See [send_it(s='a')]", [ContentDelta("See [send_it(s='a')]")]),
        ("[send_", [ContentDelta("[send_")]),
        ("[send_it(){, 1] [send_it()]", ["send_it", {}, ContentDelta("{, 1] [send_it()]")]),
    ],
)
def test_calls_in_python_may_come_without_tags_where_the_text_begins(text: str, parts: list[Any]) -> None:
    for random in (None, *map(Random, range(20))):
        assert valued(read("pythonic", text, random=random)[0]) == parts


NO_VALUES = ["s=open('x')", "'a'", "**{}", "s=1e999", "s=" + "[" * 300 + "]" * 300, "s={1, 2}", "s='a', s='b'"]


@pytest.mark.parametrize("code", NO_VALUES)
def test_code_that_is_no_value_is_reported_and_not_run(code: str) -> None:
    parts, cut = read("lfm2", FAMILIES["lfm2"].write([]).replace("[]", f"[send_it({code})] w1"))
    assert (parts[0], cut) == ("send_it", frozenset({0}))
    assert code in parts[1].text
    assert "w1" in parts[1].text


def test_a_call_after_a_broken_block_is_read_however_the_text_is_cut() -> None:
    text = FAMILIES["lfm2"].write([("time.v2-b", {})])
    expected = ["time.v2-b", {}, ContentDelta("{, 1] w1"), "time.v2-b", {}]
    for random in (None, *map(Random, range(20))):
        assert valued(read("lfm2", text.replace(")]", "){, 1]") + f" w1 {text}", random=random)[0]) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_text_after_a_call_is_not_lost_where_another_begins_to_come(name: str) -> None:
    whole, begun = (FAMILIES[name].write([("send_it", {"s": text})]) for text in ("Ulm", "Bonn"))
    begun = begun[: begun.index("send_it") + 3]
    parts, cut = read(name, f"{whole}{begun}")
    assert (valued(parts)[:2], cut) == (["send_it", {"s": "Ulm"}], frozenset())
    assert shown(name, begun).strip() in "".join(part.text for part in parts if isinstance(part, ContentDelta))


def test_gemmas_thoughts_are_reasoning_also_where_no_tools_are_offered() -> None:
    text = "<|channel>thought\nHm.\n<channel|>Rain."
    assert read("gemma4", text, tools=None)[0] == [ReasoningDelta("Hm."), ContentDelta("Rain.")]
    assert read("gemma4", "Rain.", tools=None, prompt_end=b"<|channel>thought\n<channel|>")[0] == [
        ContentDelta("Rain.")
    ]
    channels = tuple(IDS["gemma4"][token] for token in ("<|channel>", "<channel|>"))
    assert sorted(MODELS["gemma4"].shown_special_tokens(None)) == sorted(channels)
