"""The syntaxes that are known, and the one that a chat template was made for.

The first record that matches is taken, so a narrow one stands before a wider one. A template that matches none has an
unknown syntax: what its model writes stays text.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from protocol.chat_template import Markup, Written
from protocol.syntax.harmony import HARMONY
from protocol.syntax.json_calls import ARGUMENTS, CALL_ID, CallList, CallObject, SectionCalls
from protocol.syntax.parameter_calls import GEMMA_END, GEMMA_QUOTE, Form, GemmaCall, ParameterCalls, PythonCalls
from protocol.syntax.reasoning import ReasoningTags
from protocol.syntax.record import Syntax
from protocol.tools.kinds import INPUT, Function

_LFM2_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")
_MISTRAL_ID = 9  # characters


def template_has(*texts: str, without: tuple[str, ...] = ()) -> Callable[[str, Container[str]], bool]:
    """Return a `Syntax.matches` for templates that contain all of `texts` and nothing of `without`."""
    return lambda template, special_tokens: (
        all(text in template for text in texts) and not any(text in template for text in without)
    )


def _is_llama(template: str, special_tokens: Container[str]) -> bool:
    if "<function=" in template:  # Functionary's calls
        return False
    return "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template)


def _new_mistral_id(name: str, number: int) -> str:
    # The family's templates refuse a conversation with ids of another form.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID))


def _known_mistral_id(call_id: str, name: str, number: int) -> str:
    if len(call_id) == _MISTRAL_ID and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID]


MISTRAL = Syntax(
    name="mistral",
    matches=template_has("[TOOL_CALLS]"),
    opening="[TOOL_CALLS]",
    other_tags=(CALL_ID, ARGUMENTS),
    block=lambda reading, sink: CallList(reading.tags, sink),
    before='[TOOL_CALLS][{"name": "NAME", "arguments": ',  # the old form, which all versions of the family read
    after="}]",
    end_tokens=("</s>",),
    new_call_id=_new_mistral_id,
    known_call_id=_known_mistral_id,
)
MISTRAL_V11 = replace(
    MISTRAL,
    name="mistral_v11",
    matches=template_has("[TOOL_CALLS]", ARGUMENTS),
    before=f"[TOOL_CALLS]NAME{ARGUMENTS}",
    after="",
)
GRANITE = Syntax(  # 3; Granite 4 writes Hermes's form
    name="granite",
    matches=template_has("<|tool_call|>"),
    opening="<|tool_call|>",
    block=lambda reading, sink: CallList(reading.tags, sink),
    before='<|tool_call|>[{"name": "NAME", "arguments": ',
    after="}]",
    end_tokens=("<|end_of_text|>",),
)


@dataclass(frozen=True, kw_only=True)
class _Phi(Syntax):
    def declaration(self, functions: Sequence[Function]) -> Written:
        listed = json.dumps([each.for_template()["function"] for each in functions], ensure_ascii=False)
        return Written(Markup("<|tool|>"), listed, Markup("<|/tool|>"))


PHI4_MINI = _Phi(  # its template shows neither calls nor the tools of a request
    name="phi4_mini",
    matches=lambda template, special_tokens: "<|tool|>" in template and "<|tool_call|>" in special_tokens,
    opening="<|tool_call|>",
    closing="<|/tool_call|>",
    other_tags=("<|tool|>", "<|/tool|>"),
    block=GRANITE.block,
    before=GRANITE.before,
    after="}]<|/tool_call|>",
    end_tokens=("<|end|>",),
)
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _SECTION_END)
DEEPSEEK_V31 = Syntax(
    name="deepseek_v31",
    matches=template_has(_SECTION),
    opening=_SECTION,
    other_tags=_DEEPSEEK,
    block=partial(SectionCalls, _DEEPSEEK, r"\s*(?:function\s*TAG\s*NAME\s*(?:```json)?|NAME\s*TAG)\s*"),
    before=f"{_SECTION}{_DEEPSEEK[0]}NAME{_DEEPSEEK[1]}",
    after=f"{_DEEPSEEK[2]}{_SECTION_END}",
    end_tokens=("<｜end▁of▁sentence｜>",),
)
DEEPSEEK_V3 = replace(  # and R1
    DEEPSEEK_V31,
    name="deepseek_v3",
    matches=template_has(_SECTION, "```json"),
    before=f"{_SECTION}{_DEEPSEEK[0]}function{_DEEPSEEK[1]}NAME\n```json\n",
    after=f"\n```{_DEEPSEEK[2]}{_SECTION_END}",
)
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
KIMI_K2 = Syntax(
    name="kimi_k2",
    matches=template_has(_KIMI_SECTION),
    opening=_KIMI_SECTION,
    other_tags=_KIMI,
    block=partial(SectionCalls, _KIMI, r"\s*(?:functions\.)?NAME(?::[0-9]+)?\s*TAG\s*"),
    before=f"{_KIMI_SECTION}{_KIMI[0]}functions.NAME:0{_KIMI[1]}",
    after="".join(_KIMI[2:]),
    end_tokens=("<|im_end|>",),
    new_call_id=lambda name, number: f"functions.{name}:{number}",
    known_call_id=lambda call_id, name, number: f"functions.{name}:{number}",
)
HERMES = Syntax(  # Qwen 2.5 and 3, and many others
    name="hermes",
    matches=template_has("<tool_call>", without=("<arg_key>", "<function=", "<invoke name=")),
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    block=lambda reading, sink: CallObject(sink),
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    after="}\n</tool_call>",
    end_tokens=("<|im_end|>",),
)


def _in_parameters(
    name: str, matches: Callable[[str, Container[str]], bool], opening: str, form: Form, end_token: str
) -> Syntax:
    """Return the record of a family that writes calls parameter by parameter; grammars enforce JSON instead."""
    closing = f"</{opening[1:]}"
    return replace(
        HERMES,
        name=name,
        matches=matches,
        opening=opening,
        closing=closing,
        other_tags=tuple(filter(None, (*form.name, *form.key, *form.value, form.end))),
        block=partial(ParameterCalls, form, closing),
        before=f'{opening}\n{{"name": "NAME", "arguments": ',
        after=f"}}\n{closing}",
        end_tokens=(end_token,),
        holds_strict=False,
    )


_FUNCTION = Form(
    name=("<function=", ">"), key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>", trims=True
)
_INVOKE = Form(
    name=('<invoke name="', '">'), key=('<parameter name="', '">'), value=("", "</parameter>"), end="</invoke>"
)
_DSML = Form(
    name=('<｜DSML｜invoke name="', '">'),
    key=('<｜DSML｜parameter name="', '">'),
    value=("", "</｜DSML｜parameter>"),
    end="</｜DSML｜invoke>",
)
QWEN3_CODER = _in_parameters(
    "qwen3_coder", template_has("<tool_call>", "<function=", "<parameter="), "<tool_call>", _FUNCTION, "<|im_end|>"
)
SEED_OSS = replace(
    _in_parameters(
        "seed_oss",
        template_has("<seed:tool_call>", "<function="),
        "<seed:tool_call>",
        replace(_FUNCTION, trims=False),
        "<seed:eos>",
    ),
    reasoning=ReasoningTags("<seed:think>", "</seed:think>"),
)
GLM = _in_parameters(  # 4.5 and later
    "glm",
    template_has("<tool_call>", "<arg_key>"),
    "<tool_call>",
    Form(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
    "<|observation|>",
)
MINIMAX = _in_parameters(
    "minimax", template_has("<minimax:tool_call>", "<invoke name="), "<minimax:tool_call>", _INVOKE, "[e~["
)
DEEPSEEK_V32, DEEPSEEK_V4 = (
    _in_parameters(name, template_has("｜DSML｜", f"{block}>"), f"<｜DSML｜{block}>", _DSML, "<｜end▁of▁sentence｜>")
    for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
)
GEMMA4 = Syntax(
    name="gemma4",
    matches=template_has("<|tool_call>", "call:"),
    opening="<|tool_call>",
    closing=GEMMA_END,
    other_tags=(GEMMA_QUOTE,),
    block=GemmaCall,
    before="<|tool_call>call:NAME",
    after=GEMMA_END,
    end_tokens=("<turn|>", "<|tool_response>"),
    reasoning=ReasoningTags("<|channel>thought\n", "<channel|>"),
)


@dataclass(frozen=True, kw_only=True)
class _Python(Syntax):
    def write_call(self, name: str, arguments: str | Mapping[str, Any]) -> Written:
        values = {INPUT: arguments} if isinstance(arguments, str) else arguments
        code = f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        start, _, end = f"{self.before}{self.after}".partition("[")
        return Written(Markup(f"{start}["), code, Markup(f"]{end.rpartition(']')[2]}"))


LFM2 = _Python(  # its templates show no calls, and some name no tag; a grammar writes JSON
    name="lfm2",
    matches=lambda template, special_tokens: _LFM2_TAGS[0] in template or _LFM2_TAGS[0] in special_tokens,
    opening=_LFM2_TAGS[0],
    closing=_LFM2_TAGS[1],
    block=lambda reading, sink: PythonCalls(sink),
    before=f'{_LFM2_TAGS[0]}[{{"name": "NAME", "arguments": ',
    after=f"}}]{_LFM2_TAGS[1]}",
    end_tokens=("<|im_end|>",),
    holds_strict=False,
)
PYTHONIC = replace(  # of Llama 3.2 and 4, with the prompt that Meta publishes for it
    LFM2,
    name="pythonic",
    matches=template_has("func_name1("),
    opening="<|python_start|>",
    closing="<|python_end|>",
    bare="[",
    block=lambda reading, sink: PythonCalls(sink, reading.functions),
    before='[{"name": "NAME", "arguments": ',
    after="}]",
    end_tokens=("<|eot|>", "<|eom|>"),
)
LLAMA3 = Syntax(
    name="llama3",
    matches=_is_llama,
    opening="<|python_tag|>",
    bare="{",
    separator="; ",
    block=lambda reading, sink: CallObject(sink, names=reading.functions),
    before='{"name": "NAME", "parameters": ',
    after="}",
    end_tokens=("<|eot_id|>", "<|eom_id|>"),
)
DESCRIBED = replace(HERMES, name="described", matches=lambda template, special_tokens: False)
"""The form that the server itself teaches in the prompt, where a template declares no tools and has no syntax."""

SYNTAXES = {
    each.name: each
    for each in (
        *(HARMONY, MISTRAL_V11, MISTRAL, GRANITE, PHI4_MINI, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2),
        *(QWEN3_CODER, SEED_OSS, GLM, MINIMAX, DEEPSEEK_V32, DEEPSEEK_V4),
        *(HERMES, GEMMA4, LFM2, PYTHONIC, LLAMA3),
    )
}
"""The records by name, in the order in which templates are compared with them."""

END_TOKENS = tuple(token for each in SYNTAXES.values() for token in each.end_tokens)


def syntax_of(template: str, special_tokens: Container[str]) -> Syntax | None:
    """Return the syntax that a chat template was made for; None if no record matches."""
    return next((each for each in SYNTAXES.values() if each.matches(template, special_tokens)), None)


def end_tokens(template: str, special_tokens: Container[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens that end an answer, in any family, and those that do not end one of this template's family.

    Model files often name only one end token, and some name one that is inside of an answer.
    """
    syntax = syntax_of(template, special_tokens)
    inner = () if syntax is None else syntax.inner_tokens
    return tuple(token for token in END_TOKENS if token not in inner), inner
