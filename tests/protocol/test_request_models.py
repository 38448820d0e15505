"""What requests are taken, and what of them reaches the engine and the template."""

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.messages import SamplingParams
from protocol.openai.generation import MAX_LOGPROBS_IN_ALL
from protocol.tools.kinds import Function, ToolUse
from tests.protocol.request_helpers import VOCAB, chat, completion, tool


def test_null_is_absent_everywhere():
    names = """model temperature stop n stream stream_options logit_bias tools response_format max_tokens seed echo
        max_completion_tokens logprobs top_logprobs chat_template_kwargs"""
    nulls = dict.fromkeys(names.split())
    assert chat(**nulls, messages=[{"role": "user", "content": "a", "name": None, "tool_calls": None}]) == chat(
        messages=[{"role": "user", "content": "a"}]
    ).model_copy(update={"model": None})
    assert completion(max_tokens=None).to_sampling_params(VOCAB).max_tokens == 16
    assert not chat(stream=True, stream_options={"include_usage": None}).stream_options.include_usage


def test_labels_are_taken_in_silence_and_unknown_fields_are_remembered():
    extras = {
        "user": "u",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "store": True,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "moderation": {},
        "a_field_of_next_year": 1,
    }
    assert chat(**extras).model_dump() == chat().model_dump()
    assert chat(**extras).without_effect == ("verbosity", "prediction", "moderation", "a_field_of_next_year")
    assert chat(stream=True, stream_options={"include_obfuscation": False}).stream_options.include_usage is False


def test_the_neutral_value_of_an_unsupported_field_is_taken():
    neutral = {"echo": False, "use_beam_search": False}
    assert chat(**neutral, modalities=["text"]) == chat()
    assert chat(tool_choice="none", parallel_tool_calls=False).tool_use is None
    assert completion(**neutral, suffix="", best_of=None) == completion()


def test_every_sampling_field_reaches_the_engine():
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {"5": -100, "7": 3},
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    expected = fields | {"logit_bias": {5: -100.0, 7: 3.0}, "stop": ("a", "b"), "stop_token_ids": (4,)}
    for params in (
        chat(**fields, logprobs=True, top_logprobs=3).to_sampling_params(VOCAB),
        completion(**fields, logprobs=3).to_sampling_params(VOCAB),
    ):
        assert params == SamplingParams(**expected, logprobs=3)


def test_defaults_are_openais():
    params = chat().to_sampling_params(VOCAB)
    assert (params.max_tokens, params.temperature, params.logprobs, params.top_k) == (None, 1.0, None, 0)
    params = completion().to_sampling_params(VOCAB)
    assert (params.max_tokens, params.temperature, params.logprobs, params.stop) == (16, 1.0, None, ())


def test_several_choices_at_temperature_zero_are_taken():
    assert chat(n=3, temperature=0).to_sampling_params(VOCAB).n == 3


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_minus_one_and_zero_are_off(off):
    assert chat(top_k=off).to_sampling_params(VOCAB).top_k == 0


def test_seed_minus_one_is_no_seed():
    assert chat(seed=-1).to_sampling_params(VOCAB).seed is None


def test_max_completion_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=7).to_sampling_params(VOCAB).max_tokens == 7


def test_chat_logprobs_without_top_asks_for_the_sampled_token_only():
    assert chat(logprobs=True).to_sampling_params(VOCAB).logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).to_sampling_params(VOCAB).logprobs is None
    assert completion(logprobs=0).to_sampling_params(VOCAB).logprobs == 0


def test_messages_reach_the_template_as_plain_strings():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "function", "content": "", "name": "f"},
    ]
    assert chat(messages=messages).messages_for_template() == [
        {"role": "developer", "content": "Be\nbrief."},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "call_f"},
    ]


@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search"}]])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_no_tools_are_no_tools(tools, choice):
    assert chat(tools=tools, tool_choice=choice).tool_use is None


def test_tools_are_what_may_and_must_be_called():
    tools = [tool("f", description="d", parameters={"type": "object"}, strict=True), tool("g")]
    functions = (
        Function(name="f", description="d", parameters={"type": "object"}, strict=True),
        Function(name="g"),
    )
    assert chat(tools=tools).tool_use == ToolUse(functions=functions)
    assert chat(tools=tools, tool_choice="none").tool_use is None
    assert chat(tools=tools, tool_choice="required", parallel_tool_calls=False).tool_use == ToolUse(
        functions=functions, choice="required", parallel=False
    )
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}}).tool_use
    assert named == ToolUse(functions=functions, choice="required", named="g")
    assert named.callable_functions == functions[1:]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": [1]}', {"a": [1]}), ("", {}), ("{broken", "{broken"), ("5", "5"), ('{"a":' * 400 + "1" + "}" * 400, None)],
)
def test_calls_and_reasoning_of_earlier_turns_reach_the_template(arguments, read):
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = chat(
        messages=[{"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "hm"}]
    ).messages_for_template()
    assert message["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "f", "arguments": arguments if read is None else read},
        }
    ]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("", "hm", "hm")


def test_a_refusal_of_an_earlier_turn_is_what_the_assistant_has_said():
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "refusal": "No."}]
    body = chat(messages=said)
    assert body.messages_for_template()[1] == {"role": "assistant", "content": "No."}
    assert body.messages_for_template(as_parts=True)[1]["content"] == [{"type": "text", "text": "No."}]


def test_reasoning_effort_and_template_kwargs_reach_the_template():
    assert chat(reasoning_effort="none").template_variables() == {"reasoning_effort": "none", "enable_thinking": False}
    wish = {"enable_thinking": True}
    assert chat(reasoning_effort="none", chat_template_kwargs=wish).template_variables()["enable_thinking"] is True
    assert chat().template_variables() == {}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([0], [[0]])],
)
def test_prompts_come_as_one_or_many_texts_or_token_lists(prompt, expected):
    assert completion(prompt=prompt).prompts(VOCAB) == expected


@pytest.mark.parametrize(
    ("lengths", "fields", "param"),
    [
        ([10, 10], {"prompt_logprobs": -1, "n": 2}, None),
        ([10, 20], {"prompt_logprobs": -1, "n": 2}, "prompt_logprobs"),
        ([1], {"logprobs": -1, "max_tokens": 49}, None),
        ([1], {"logprobs": -1, "max_tokens": 50}, "logprobs"),
        ([1], {"logprobs": -1, "max_tokens": -1}, "logprobs"),
        ([63], {"logprobs": -1, "max_tokens": -1}, None),
        ([40, 1], {"logprobs": -1, "max_tokens": 10**6, "n": 1}, "logprobs"),
        ([60, 60], {"logprobs": -1, "max_tokens": 10**6, "n": 6}, None),
        ([60, 60], {"logprobs": -1, "max_tokens": 10**6, "n": 7}, "logprobs"),
        ([1], {"logprobs": -1, "max_tokens": 10**6, "logprob_token_ids": [1]}, None),
    ],
)
def test_log_probabilities_of_the_whole_vocabulary_are_bounded(lengths, fields, param):
    asked = completion(**fields)
    vocab_size = MAX_LOGPROBS_IN_ALL // 49 if "logprobs" in fields else MAX_LOGPROBS_IN_ALL // 40
    if param is None:
        asked.check_outputs(lengths, vocab_size=vocab_size, max_model_len=64)
        return
    words = f"max_tokens of at most {49 // (asked.n * len(lengths))}," if param == "logprobs" else "send fewer"
    with pytest.raises(InvalidRequest, match=words) as refused:
        asked.check_outputs(lengths, vocab_size=vocab_size, max_model_len=64)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("context", "fields", "fitting"),
    [
        (8192, {"logprobs": 20, "n": 12}, None),
        (8192, {"logprobs": 20, "n": 128}, MAX_LOGPROBS_IN_ALL // (21 * 128)),
        (8192, {"logprobs": 20, "n": 128, "max_tokens": 780}, None),
        (8192, {"logprobs": 0, "n": 128}, None),
        (8192, {"logprobs": 0, "n": 128, "logprob_token_ids": [*range(128)]}, MAX_LOGPROBS_IN_ALL // (129 * 128)),
        (2**20, {"logprobs": 20}, None),  # one choice, of whatever length
        (2**20, {"logprobs": 20, "n": 2}, 2**19),
    ],
)
def test_log_probabilities_of_generated_tokens_are_bounded_in_all(context, fields, fitting):
    asked = completion(**{"max_tokens": -1, **fields})
    if fitting is None:
        asked.check_outputs([10], vocab_size=50_000, max_model_len=context)
        return
    with pytest.raises(InvalidRequest, match=f"max_tokens of at most {fitting}, ") as refused:
        asked.check_outputs([10], vocab_size=50_000, max_model_len=context)
    assert refused.value.param == "logprobs"
    completion(**{**fields, "max_tokens": fitting}).check_outputs([10], vocab_size=50_000, max_model_len=context)
