"""Reasoning and tool calls in chat's spelling, streamed and whole, as the SDK reads them."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import FinishReason
from protocol.chat_template import ChatTemplate
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter
from protocol.syntax.model_syntax import ModelSyntax
from tests.protocol.wire_helpers import answer, events, lp, output, pieces_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
SYNTAX, LLAMA, MISTRAL = (
    ModelSyntax(ChatTemplate(source, {}), {}) for source in ("<tool_call></think>", "<|python_tag|>", "[TOOL_CALLS]")
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
TEXTS = [
    "<think>Hm.</think>Hello.",
    f"<think>Hm.</think>\n\nI look. {CALL}\n{CALL}",
    CALL,
    f"No <tool_call> at all{CALL[:-30]}",
    "<think>Hm",
    "",
]


def request(**fields):
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def stream(outputs, syntax=SYNTAX, **fields):
    body = request(stream=True, tools=TOOLS, **fields)
    chunks = ChoicesStreamWriter(body, answer(message_format=body.message_format(syntax, b"")))
    return events(b"".join([chunks.feed_output(each) for each in outputs]) + chunks.finish_stream())


def whole(outputs, syntax=SYNTAX, **fields):
    body = request(tools=TOOLS, **fields)
    writer = ChoicesBodyWriter(body, answer(message_format=body.message_format(syntax, b"")))
    for each in outputs:
        writer.feed_output(each)
    return orjson.loads(writer.body())


def called(message):
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def test_a_call_is_its_id_and_name_once_and_then_its_arguments():
    chunks = stream([output("<think>Hm.</think>I look. "), output(CALL), output("", finish=STOP)])
    call_id = chunks[3]["choices"][0]["delta"]["tool_calls"][0]["id"]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm.", "reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "é"}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS), finish=st.sampled_from([STOP, LENGTH]), logprobs=st.booleans())
def test_the_stream_is_the_whole_message_however_it_is_cut(data, text, finish, logprobs):
    pieces = data.draw(pieces_of(text))
    options = {"logprobs": logprobs, "stream_options": {"include_usage": True}}
    outputs = [
        output(piece, token_ids=[number % 4], logprobs=[lp(number % 4)] if logprobs else None, num_output_tokens=number)
        for number, piece in enumerate(pieces, 1)
    ]
    outputs.append(output("", finish=finish, logprobs=[] if logprobs else None, num_output_tokens=len(pieces)))
    merged = output(
        text,
        finish=finish,
        token_ids=[number % 4 for number in range(1, len(pieces) + 1)],
        logprobs=[lp(number % 4) for number in range(1, len(pieces) + 1)] if logprobs else None,
        num_output_tokens=len(pieces),
    )
    collected, at_once = whole(outputs, logprobs=logprobs), whole([merged], logprobs=logprobs)
    message = collected["choices"][0]["message"]
    ChatCompletion.model_validate(collected)
    for other, own in zip(
        at_once["choices"][0]["message"].get("tool_calls", ()), message.get("tool_calls", ()), strict=True
    ):
        other["id"] = own["id"]  # the one thing that is drawn
    assert collected == at_once

    state = ChatCompletionStreamState()
    chunks = stream(outputs, **options)
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    final = state.current_completion_snapshot.model_dump()
    streamed = final["choices"][0]
    assert (streamed["message"]["content"] or None) == (message["content"] or None)
    assert (streamed["message"].get("reasoning") or None) == message["reasoning"]
    assert called(streamed["message"]) == called(message)
    assert streamed["finish_reason"] == collected["choices"][0]["finish_reason"]
    assert final["usage"]["completion_tokens"] == collected["usage"]["completion_tokens"]
    assert (
        final["usage"]["completion_tokens_details"]["reasoning_tokens"]
        == (collected["usage"]["completion_tokens_details"]["reasoning_tokens"])
    )
    if logprobs and pieces:
        written = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
        entries = [entry for each in written if each for entry in each["content"]]
        assert entries == collected["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("choice", "text", "finish", "reason"),
    [
        ("auto", CALL, STOP, "tool_calls"),
        ("auto", CALL.removesuffix("\n</tool_call>"), STOP, "tool_calls"),
        ("auto", CALL.removesuffix("}\n</tool_call>"), STOP, "tool_calls"),
        ("auto", CALL[: CALL.index("é")], STOP, "length"),  # by a stop string, or by the model
        ("auto", CALL + CALL[: CALL.index("é")], STOP, "length"),
        ("auto", CALL.replace('"é"', "01") + CALL, STOP, "length"),  # the model went on after half a call
        ("required", CALL, STOP, "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, CALL, STOP, "stop"),
        ({"type": "function", "function": {"name": "f"}}, CALL[: CALL.index("é")], STOP, "length"),
        ("auto", CALL[:-30], LENGTH, "length"),
        ("auto", "Hello.", STOP, "stop"),
        ("none", CALL, STOP, "stop"),
    ],
)
def test_calls_are_an_end_of_their_own_unless_the_client_named_one(choice, text, finish, reason):
    outputs = [output(text, finish=finish)]
    assert whole(outputs, tool_choice=choice)["choices"][0]["finish_reason"] == reason
    assert stream(outputs, tool_choice=choice)[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("finish", [STOP, LENGTH])
@pytest.mark.parametrize("syntax", [SYNTAX, LLAMA, MISTRAL])
def test_what_was_begun_of_a_demanded_call_is_no_text(syntax, finish):
    tools = request(tools=TOOLS, tool_choice="required").tool_use
    grammar = orjson.loads(syntax.grammar(tools, None, prompt_end=b"").value)
    tag = grammar["tags"][0]
    text = f"{tag['begin']}{{}}{tag['end']}{grammar['separator']}{tag['begin']}"
    for end in range(len(text)):
        cut = "<think>Hm.</think>" * (syntax is SYNTAX) + text[:end]
        [choice] = whole([output(cut, finish=finish)], syntax=syntax, tool_choice="required")["choices"]
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "length" or finish is STOP
        deltas = [
            each["choices"][0]["delta"] for each in stream([output(cut, finish=finish)], syntax, tool_choice="required")
        ]
        assert not any(delta.get("content") for delta in deltas)
        [free] = whole([output(cut, finish=finish)], syntax=syntax)["choices"]
        if not free["message"].get("tool_calls"):
            assert (free["message"]["content"] or "") == text[:end]


def test_a_message_of_calls_alone_has_no_content():
    message = whole([output(CALL, finish=STOP)])["choices"][0]["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert {**call, "id": ""} == {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def test_reasoning_can_be_left_out_and_is_counted_all_the_same():
    spelled = [b"<think>", b"Hm.", b"</think>", b"Hi"]
    body = request(include_reasoning=False)
    form = body.message_format(SYNTAX, b"")
    writer = ChoicesBodyWriter(body, answer(token_bytes=spelled.__getitem__, message_format=form))
    writer.feed_output(output("<think>Hm.</think>Hi", token_ids=[0, 1, 2, 3], finish=STOP, num_output_tokens=4))
    whole = orjson.loads(writer.body())
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Hi", None)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_every_choice_has_its_own_parts():
    outputs = [output("<think>a", index=0), output("b", index=1, finish=STOP), output("</think>c", finish=STOP)]
    messages = [choice["message"] for choice in whole(outputs, n=2)["choices"]]
    assert [(message["reasoning"], message["content"]) for message in messages] == [("a", "c"), (None, "b")]
