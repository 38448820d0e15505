"""Chat answers, streamed and whole, as the SDK reads them."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.messages import FinishReason
from protocol.answers import Head
from protocol.errors import ApiError
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter
from tests.protocol.wire_helpers import HEAD, answer, events, generations, lp, output, texts

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def request(**fields):
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def stream(outputs, head=HEAD, **fields):
    chunks = ChoicesStreamWriter(request(stream=True, **fields), answer(head=head))
    return b"".join([chunks.feed_output(each) for each in outputs]) + chunks.finish_stream()


def whole(outputs, **fields):
    writer = ChoicesBodyWriter(request(**fields), answer())
    for each in outputs:
        writer.feed_output(each)
    return orjson.loads(writer.body())


def frame(choice, **extra):
    chunk = {"id": HEAD.id, "object": "chat.completion.chunk", "created": HEAD.created, "model": HEAD.model}
    chunk["system_fingerprint"] = "fp_1"
    return b"data: " + orjson.dumps({**chunk, "choices": [choice], **extra}) + b"\n\n"


def test_a_stream_is_role_then_text_then_an_empty_delta_with_the_finish_reason():
    got = stream([output("Hel"), output("lo"), output("!", finish=STOP, stop_reason="\n")])
    assert got == b"".join(
        [
            frame({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}),
            frame({"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}),
            frame({"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}),
            frame({"index": 0, "delta": {"content": "!"}, "logprobs": None, "finish_reason": None}),
            frame({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"}),
            b"data: [DONE]\n\n",
        ]
    )


def test_clients_that_name_a_tier_are_told_the_only_one():
    outputs = [output("Hel"), output("lo", finish=STOP)]
    assert whole(outputs, service_tier="auto")["service_tier"] == "default"
    assert whole(outputs)["service_tier"] is None
    assert {chunk.get("service_tier") for chunk in events(stream(outputs, service_tier="flex"))} == {"default"}
    assert not any("service_tier" in chunk for chunk in events(stream(outputs)))


@settings(deadline=None)
@given(text=texts.filter(bool), head=st.builds(Head, id=texts, created=st.integers(0, 2**40), model=texts))
@pytest.mark.parametrize("usage", [False, True])
def test_spliced_frames_equal_the_straightforward_ones(usage, text, head):
    body = request(stream=True, stream_options={"include_usage": usage})
    chunks = ChoicesStreamWriter(body, answer(head=head))
    chunks.feed_output(output(index=0))
    expected = {
        "id": head.id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }
    if usage:
        expected["usage"] = None
    assert chunks.feed_output(output(text)) == b"data: " + orjson.dumps(expected) + b"\n\n"


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 3), usage=st.booleans(), continuous=st.booleans())
def test_concatenated_deltas_are_the_whole_message(data, n, usage, continuous):
    outputs = data.draw(generations(n))
    options = {"include_usage": usage, "continuous_usage_stats": usage and continuous}
    chunks = events(stream(outputs, n=n, stream_options=options))
    body = whole(outputs, n=n)

    ChatCompletion.model_validate(body, strict=True)
    assert body["system_fingerprint"] == "fp_1"
    for chunk in chunks:
        assert chunk["system_fingerprint"] == "fp_1"
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert (chunk["id"], chunk["created"], chunk["model"]) == HEAD
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == body["usage"]
        assert all((chunk["usage"] is not None) == continuous for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)

    for choice in body["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        opening, *middle, closing = mine
        assert opening["delta"] == {"role": "assistant", "content": ""}
        assert all(m["delta"].keys() == {"content"} and m["finish_reason"] is None for m in middle)
        assert closing["delta"] == {}
        assert (closing["finish_reason"], closing["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert "".join(m["delta"]["content"] for m in middle) == choice["message"]["content"]
        entries = [entry for m in middle if m["logprobs"] for entry in m["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data())
def test_outputs_that_arrive_merged_give_the_same_message(data):
    outputs = data.draw(generations(1))
    merged = output(
        "".join(each.text for each in outputs),
        finish=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        token_ids=[token for each in outputs for token in each.token_ids],
        logprobs=None if outputs[0].logprobs is None else [p for each in outputs for p in each.logprobs],
        num_output_tokens=outputs[-1].num_output_tokens,
        num_cached_tokens=outputs[-1].num_cached_tokens,
    )
    assert whole([merged]) == whole(outputs)


def test_usage_counts_the_prompt_once_and_every_choice():
    body = whole(
        [
            output("a", index=1, finish=STOP, num_output_tokens=3, num_cached_tokens=4),
            output("b", index=0, finish=LENGTH, num_output_tokens=4, num_cached_tokens=1),
        ],
        n=2,
    )
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": None,
    }


def test_continuous_usage_grows_with_every_chunk():
    outputs = [output("a", num_output_tokens=1), output("b", num_output_tokens=2, finish=STOP)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(stream(outputs, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 2, 2]
    assert [c["usage"]["total_tokens"] for c in chunks] == [5, 6, 7, 7, 7]


def test_the_first_chunk_repeats_what_is_asked_for_of_the_prompt():
    outputs = [
        output("a", token_ids=[1], prompt_logprobs=[lp(4, -0.5, [(4, -0.5)])]),
        output("b", token_ids=[2], finish=STOP),
    ]
    fields = {"return_token_ids": True, "prompt_logprobs": 1}
    first, *others = events(stream(outputs, **fields))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    told = whole(outputs, **fields)
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert first[name] == told[name]
        assert first[name] is not None
        assert not any(name in chunk for chunk in others)


def test_an_output_without_text_makes_no_chunk_of_its_own():
    chunks = ChoicesStreamWriter(request(stream=True), answer())
    chunks.feed_output(output(token_ids=[1]))
    assert chunks.feed_output(output(token_ids=[2])) == b""


def test_logprobs_of_held_back_text_are_sent_when_they_are_known():
    chunks = events(stream([output(logprobs=[lp(0)]), output("The", finish=STOP, logprobs=[])], logprobs=True))
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "", "The", None]
    assert [c["choices"][0]["logprobs"] is not None for c in chunks] == [False, True, False, False]


def test_logprob_entries_carry_the_tokens_bytes_and_never_infinity():
    position = lp(5, float("-inf"), top=[(4, -0.1), (8, float("nan"))])
    body = whole([output("", finish=STOP, logprobs=[position])], logprobs=True, top_logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -9999.0,
                "bytes": [0xF0, 0x9F],
                "top_logprobs": [
                    {"token": "水", "logprob": -0.1, "bytes": [0xE6, 0xB0, 0xB4]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xFF]},
                ],
            }
        ],
        "refusal": None,
    }


def test_keys_that_sdk_users_read_are_there_as_null():
    body = whole([output("x", finish=STOP)])
    response: Any = ChatCompletion.construct(**body)  # with fields that the SDK does not declare
    assert response.prompt_logprobs is None
    assert response.choices[0].stop_reason is None
    assert response.choices[0].message.reasoning is None
    assert body["choices"][0]["message"]["refusal"] is None
    assert body["choices"][0]["logprobs"] is None
    assert "tool_calls" not in body["choices"][0]["message"]


@pytest.mark.parametrize(("finish", "status"), [(FinishReason.ERROR, 500), (FinishReason.TIMEOUT, 504)])
def test_a_failed_output_is_an_error_and_not_an_answer(finish, status):
    failed = output(finish=finish, error="CUDA error at /home/someone/kernel.cu 0x7f00")
    for writer in (ChoicesStreamWriter(request(stream=True), answer()), ChoicesBodyWriter(request(), answer())):
        with pytest.raises(ApiError) as caught:
            writer.feed_output(failed)
        assert caught.value.status == status
        assert caught.value.type == "server_error"
        assert "/" not in caught.value.message
        assert "0x" not in caught.value.message
