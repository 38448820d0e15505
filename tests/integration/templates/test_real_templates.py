"""The chat templates of real models: which syntax each has, and that each shows a whole history.

`make templates` unpacks them from the source archive of llama-cpp-python; they are not part of this repository.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from protocol.chat_template import ChatTemplate, segments_text
from protocol.syntax.harmony import HARMONY
from protocol.syntax.model_syntax import ModelSyntax
from protocol.tools.kinds import Function, ToolUse
from tests.protocol import test_family_syntaxes as families
from tests.protocol import test_harmony as harmony

FOLDER = Path(sys.prefix) / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
HERMES = {
    "Bielik-11B-v3.0-Instruct",
    "MiMo-VL",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-QwQ-32B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Reka-Edge",
    "ibm-granite-granite-4.0",
    "ibm-granite-granite-4.1",
    "unsloth-Apriel-1.5",
}
FAMILIES = {
    "qwen3_coder": {"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"},
    "seed_oss": {"ByteDance-Seed-OSS"},
    "glm": {
        *("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash"),
        *("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    },
    "minimax": {"MiniMax-M2"},
    "mistral_v11": {
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "unsloth-mistral-Devstral-Small-2507",
    },
    "gemma4": {"google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"},
    "lfm2": {"LFM2.5-8B-A1B"},  # the others by their special tokens
    "granite": {"ibm-granite-granite-3.3-2B-Instruct"},
    "deepseek_v3": {
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama-cpp-deepseek-r1",
    },
    "deepseek_v31": {"deepseek-ai-DeepSeek-V3.1"},
    "kimi_k2": {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"},
    "deepseek_v32": {"deepseek-ai-DeepSeek-V3.2"},
    "deepseek_v4": {"deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"},
}
LLAMA = {f"meta-llama-Llama-{name}-Instruct" for name in ("3.1-8B", "3.2-3B", "3.3-70B")}
# Templates that cannot show all of a history in any form that we know.
LOST = {
    "Mistral-Small-3.2-24B-Instruct-2506": {"I look."},  # the text of a message with calls
    "mistralai-Mistral-Nemo-Instruct-2407": {"I look.", "Be brief."},  # and the system's, if a result is last
}
REFUSED = {"fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it"}  # needs a variable; knows no system message

HIDES_THOUGHTS = {"Apriel-1.6-15b-Thinker-fixed"}  # shows those of a last message

WEATHER = Function(name="get_weather", description="Says it.", parameters={"type": "object", "properties": {}})
TIME = Function(name="get_time", description="Says it.", parameters={"type": "object", "properties": {}})
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            harmony.call("call_0123456789abcdef01234567", "get_weather", city='Ulm "Mitte"\nnorth'),
            harmony.call("call_89abcdef0123456789abcdef", "get_time", zone={"deep": [1, "CET"]}),
        ],
    },
    {"role": "tool", "content": "Rain.", "tool_call_id": "call_0123456789abcdef01234567"},
    {"role": "tool", "content": "Noon.", "tool_call_id": "call_89abcdef0123456789abcdef"},
    {"role": "assistant", "content": "Rain at noon."},
    {"role": "user", "content": "And in Bonn?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [harmony.call("call_76543210fedcba9876543210", "get_weather", city="Bonn")],
    },
    {"role": "tool", "content": "Sun.", "tool_call_id": "call_76543210fedcba9876543210"},
]
WORDS = [
    *("Be brief.", "Weather?", "I look.", "get_weather", "Ulm", "Mitte", "north", "get_time", "deep", "CET", "Rain."),
    *("Noon.", "Rain at noon.", "And in Bonn?", "Bonn", "Sun."),
]


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def template(name: str, control_tokens: tuple[str, ...] = ()) -> ChatTemplate:
    found = ChatTemplate(source(name), {"bos_token": "<s>", "eos_token": "</s>"}, control_tokens)
    found.find_content_form(name)
    return found


def test_the_templates_are_there() -> None:
    assert len(NAMES) >= 50, "make templates unpacks them"


@pytest.mark.parametrize("name", NAMES)
def test_the_syntax_is_found_and_none_is_guessed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        syntax = ModelSyntax(template(name), {}, name=name)
    assert (syntax.name == "hermes") == (name in HERMES)
    assert (syntax.name == "llama3") == (name in LLAMA)
    assert (syntax.name == "harmony") == ("gpt-oss" in name)
    for family, names in FAMILIES.items():
        assert (syntax.name == family) == (name in names)
    assert len(caplog.records) == (syntax.name == "none")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_every_call_result_and_text_of_a_history_is_in_the_prompt(name: str) -> None:
    chat_template = template(name)
    syntax = ModelSyntax(chat_template, {}, name=name)
    messages, tools = syntax.for_template(HISTORY, ToolUse(functions=(WEATHER, TIME)))
    text = segments_text(chat_template.render(messages, tools=tools))
    assert {word for word in WORDS if word not in text} == LOST.get(name, set())


ROUGH: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "system", "content": "Use metric units."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [harmony.call("call_0123456789abcdef01234567", "get_weather")]},
    {"role": "tool", "content": "No JSON.", "tool_call_id": "call_0123456789abcdef01234567"},
    {"role": "assistant", "content": "I am sorry."},
    {"role": "system", "content": "It is noon."},
    {"role": "user", "content": "Again?"},
]
ROUGH[3]["tool_calls"][0]["function"]["arguments"] = "city is Ulm"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_arguments_that_are_no_json_and_later_system_messages_are_in_the_prompt(name: str) -> None:
    chat_template = template(name)
    syntax = ModelSyntax(chat_template, {}, name=name)
    messages, tools = syntax.for_template(ROUGH, ToolUse(functions=(WEATHER, TIME)))
    text = segments_text(chat_template.render(messages, tools=tools))
    words = [each["content"] for each in ROUGH if each["content"]] + ["get_weather", "city is Ulm"]
    assert [word for word in words if word not in text] == []


WITH_THOUGHTS = [name for name in NAMES if re.search(r"reasoning_content|message\.thinking|'thinking'", source(name))]


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_the_reasoning_of_the_turn_that_goes_on_is_in_the_prompt(name: str) -> None:
    chat_template = template(name)
    syntax = ModelSyntax(chat_template, {}, name=name)
    thought = dict.fromkeys(("reasoning", "reasoning_content"), "Sunny, I guess.")
    messages = [*HISTORY[:-2], {**HISTORY[-2], **thought}, HISTORY[-1]]
    shown, tools = syntax.for_template(messages, ToolUse(functions=(WEATHER, TIME)))
    variables = syntax.thinking_variables({"enable_thinking": True})
    text = segments_text(chat_template.render(shown, tools=tools, variables=variables))
    assert text.count("Sunny, I guess.") == (name not in HIDES_THOUGHTS)
    assert "'thinking'" not in text


GPT_OSS = "openai-gpt-oss-120b"


def test_gpt_oss_shows_three_turns_as_the_model_wrote_them() -> None:
    chat_template = template(GPT_OSS, HARMONY.tags)
    syntax = ModelSyntax(chat_template, harmony.IDS)

    def prompt(messages: list[dict[str, Any]]) -> str:
        shown, tools = syntax.for_template(messages, harmony.TOOLS)
        return segments_text(chat_template.render(shown, tools=tools, variables=syntax.thinking_variables({})))

    kept = prompt(harmony.FIRST_TURN)
    assert "Be brief.\n\nMetric units." in kept
    assert "Reasoning: medium" in kept
    assert (
        "<|start|>assistant<|channel|>analysis<|message|>Two calls.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{harmony.ULM}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Rain."<|end|>'
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>"
    ) in kept
    assert kept.endswith("<|start|>assistant")
    answered = [
        *harmony.FIRST_TURN,
        {"role": "assistant", "content": "Rain at noon."},
        {"role": "user", "content": "Hm?"},
    ]
    dropped = prompt(answered)
    assert "Two calls." not in dropped
    assert all(dropped.count(text) == 1 for text in ("I look.", '"Rain."', '"Noon."', "Rain at noon.", "Hm?"))
    assert json.dumps(harmony.QUOTES)[1:-1] in dropped


@pytest.mark.parametrize("part", range(4))
def test_constructed_answers_of_gpt_oss_are_read_the_same_however_they_are_cut(part: int) -> None:
    for number in range(part, 1000, 4):  # by hand with 10 cuttings each
        text, parts = harmony.constructed(number)
        whole = harmony.read(text)
        assert whole[0] == harmony.plain(parts)
        for seed in range(2):
            assert harmony.read(text, random=Random(10_000 * number + seed)) == whole


@pytest.mark.parametrize("name", families.FAMILIES)
def test_answers_of_every_family_are_read_the_same_however_they_are_cut(name: str) -> None:
    # By hand: 500 answers with 20 cuttings each, and 10,000 damaged ones, of every family.
    families.check_constructed(name, seeds=range(500), num_cuttings=1)
    families.check_damaged(name, seeds=range(1000, 1500))
