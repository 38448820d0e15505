"""Text completions, streamed and whole, as the SDK reads them."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from engine.messages import FinishReason
from protocol.openai.completions import CompletionRequest
from protocol.openai.logprobs import CompletionLogprobs
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter
from tests.protocol.wire_helpers import answer, events, generations, lp, output

STOP = FinishReason.STOP


def request(hidden_ids=None, **fields):
    return CompletionRequest.model_validate({"prompt": "Once", **fields})


def answer_to(prompt="Once", hidden_ids=frozenset(), **_):
    return answer(1 if isinstance(prompt, str) else len(prompt), hidden_ids=hidden_ids)


def stream(outputs, **fields):
    chunks = ChoicesStreamWriter(request(stream=True, **fields), answer_to(**fields))
    return b"".join([chunks.feed_output(each) for each in outputs]) + chunks.finish_stream()


def whole(outputs, **fields):
    writer = ChoicesBodyWriter(request(**fields), answer_to(**fields))
    for each in outputs:
        writer.feed_output(each)
    return orjson.loads(writer.body())


def test_a_stream_has_no_role_chunk_and_ends_with_an_empty_text():
    chunks = events(stream([output("Hi"), output("!", finish=STOP, stop_reason=7)]))
    assert [c["choices"][0] for c in chunks] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "!", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": 7},
    ]
    assert all(c["object"] == "text_completion" for c in chunks)


def test_choices_are_numbered_prompt_by_prompt():
    outputs = [output(text, index=index, finish=STOP) for text, index in [("d", 3), ("a", 0), ("c", 2), ("b", 1)]]
    body = whole(outputs, n=2, prompt=["x", "y"])
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    streamed = events(stream(outputs, n=2, prompt=["x", "y"]))
    assert {(c["choices"][0]["index"], c["choices"][0]["text"]) for c in streamed if c["choices"][0]["text"]} == {
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    }
    assert body["usage"]["prompt_tokens"] == 10  # two prompts of five


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 2))
def test_concatenated_chunks_are_the_whole_completion(data, n):
    outputs = data.draw(generations(2 * n))
    body = whole(outputs, n=n, prompt=["x", "y"], logprobs=3)
    chunks = events(stream(outputs, n=n, prompt=["x", "y"], logprobs=3, stream_options={"include_usage": True}))
    Completion.model_validate(body, strict=True)
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], body["usage"])
    for chunk in chunks:
        # The SDK's type serves whole bodies too and wants a finish reason; its client does not check it in streams.
        choice = chunk["choices"][0]
        checked = {**chunk, "choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"}]}
        Completion.model_validate(checked, strict=True)
    for choice in body["choices"]:
        *middle, closing = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert (closing["text"], closing["finish_reason"]) == ("", choice["finish_reason"])
        assert "".join(m["text"] for m in middle) == choice["text"]
        slices = [m["logprobs"] for m in middle if m["logprobs"]]
        for key, values in (choice["logprobs"] or {}).items():
            assert [value for part in slices for value in part[key]] == values


@settings(deadline=None)
@given(
    raw=st.text(st.characters(exclude_categories=["Cs"])).map(str.encode) | st.binary(),
    hidden=st.sets(st.integers(0, 9)),
    data=st.data(),
)
def test_text_offsets_point_at_the_character_that_the_token_begins(raw, hidden, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    tokens = [raw[a:b] for a, b in pairwise(cuts)]
    write = CompletionLogprobs(tokens.__getitem__, False, hidden, 2)
    offsets = [write([lp(i)])["text_offset"][0] for i in range(len(tokens))]  # chunk by chunk
    for number, offset in enumerate(offsets):
        # The two tokens of an echoed prompt are shown, hidden or not.
        before = b"".join(token for other, token in enumerate(tokens[:number]) if other < 2 or other not in hidden)
        assert offset == len(before.decode("utf-8", "replace"))


def test_a_hidden_special_token_has_no_characters_in_streams_and_bodies():
    special = [output("a", logprobs=[lp(2)]), output("", logprobs=[lp(0)]), output("b", finish=STOP, logprobs=[lp(2)])]
    for hidden, expected in ((frozenset(), [0, 1, 4]), ({0}, [0, 1, 1])):
        body = whole(special, logprobs=1, hidden_ids=hidden)
        assert body["choices"][0]["logprobs"]["text_offset"] == expected
        chunks = [chunk["choices"][0]["logprobs"] for chunk in events(stream(special, logprobs=1, hidden_ids=hidden))]
        assert [offset for chunk in chunks if chunk for offset in chunk["text_offset"]] == expected


def test_logprobs_are_parallel_arrays_with_the_sampled_token_always_among_the_top():
    position = lp(1, -3.0, top=[(0, -0.1), (2, float("-inf"))])
    body = whole([output(" cat", finish=STOP, logprobs=[lp(0, -0.5), position])], logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 3],
        "token_logprobs": [-0.5, -3.0],
        "tokens": ["The", " cat"],
        "top_logprobs": [{"The": -0.5}, {"The": -0.1, "\n": -9999.0, " cat": -3.0}],
    }


def test_tokens_that_are_no_text_keep_their_own_names():
    body = whole([output("", finish=STOP, logprobs=[lp(6, -1.0, top=[(7, -2.0), (8, -3.0)])])], logprobs=2)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [
        {"bytes:\\x88": -2.0, "bytes:\\xff": -3.0, "bytes:\\x90": -1.0}
    ]
