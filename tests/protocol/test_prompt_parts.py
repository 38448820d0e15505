"""What an answer repeats of its prompt, however the outputs come: one by one, merged, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import FinishReason, RequestOutput
from protocol.openai.completions import CompletionRequest
from protocol.openai.output import ChoicesBodyWriter, ChoicesStreamWriter
from tests.protocol.wire_helpers import VOCABULARY, answer, events, lp, output, positions, texts

PROMPT = [0, 1, 4]  # "The cat水"


@st.composite
def one_choice(draw: st.DrawFn) -> list[RequestOutput]:
    """The outputs of a choice whose first one has the log-probabilities of the prompt."""
    outputs = []
    for text in draw(st.lists(texts, min_size=1, max_size=6)):
        fresh = draw(st.lists(positions, max_size=2))
        outputs.append(output(text, token_ids=[each.token_id for each in fresh], logprobs=fresh))
    outputs[0].prompt_logprobs = [lp(1, -0.25, [(2, -0.125), (1, -0.25)]), lp(4, -3.0, [(0, -1.0), (3, -2.0)])]
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


@st.composite
def merged(draw: st.DrawFn, outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Some that follow each other as one, as a reader that lags gets them."""
    together = [msgspec.structs.replace(outputs[0])]
    for each in outputs[1:]:
        last = together[-1]
        if draw(st.booleans()):
            last.text += each.text
            last.token_ids = last.token_ids + each.token_ids
            last.logprobs = (last.logprobs or []) + (each.logprobs or [])
            last.finish_reason = each.finish_reason
        else:
            together.append(msgspec.structs.replace(each))
    return together


def request(prompt: str = "The cat水", **fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": prompt, **fields})


def streamed(outputs: list[RequestOutput], wanted: CompletionRequest) -> dict[str, Any]:
    chunks = ChoicesStreamWriter(wanted, answer(prompts=[PROMPT]))
    found = events(b"".join([*map(chunks.feed_output, outputs), chunks.finish_stream()]))
    choices = [chunk["choices"][0] for chunk in found]
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(column)
    told = [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice]
    assert told == ([] if wanted.prompt_logprobs is None else [choices[0]["prompt_logprobs"]])
    prompts = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
    assert len(prompts) == wanted.return_token_ids
    return {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": columns or None,
        "token_ids": [token for choice in choices for token in choice.get("token_ids", ())] or None,
        "prompt_token_ids": prompts[0] if prompts else None,
        "prompt_logprobs": told[0] if told else None,
    }


def whole(
    outputs: list[RequestOutput], wanted: CompletionRequest, prompt: Sequence[int] = tuple(PROMPT)
) -> dict[str, Any]:
    writer = ChoicesBodyWriter(wanted, answer(prompts=[list(prompt)]))
    for each in outputs:
        writer.feed_output(each)
    return orjson.loads(writer.body())["choices"][0]


@pytest.mark.slow
@settings(deadline=None)
@given(outputs=one_choice(), echo=st.booleans(), ids=st.booleans(), told=st.booleans(), data=st.data())
def test_streamed_merged_or_whole_it_is_the_same(
    outputs: list[RequestOutput], echo: bool, ids: bool, told: bool, data: st.DataObject
) -> None:
    wanted = request(echo=echo, logprobs=1 if echo else None, return_token_ids=ids, prompt_logprobs=1 if told else None)
    expected = whole(outputs, wanted)
    for way in (outputs, data.draw(merged(outputs))):
        found = streamed([msgspec.structs.replace(each) for each in way], wanted)
        for name, value in found.items():
            assert (value or None) == (_shown(expected[name]) or None), name
    if echo:
        assert expected["text"].startswith("The cat水")
        assert expected["logprobs"]["tokens"][:3] == ["The", " cat", "水"]
        assert expected["logprobs"]["token_logprobs"][:3] == [None, -0.25, -3.0]
        assert expected["logprobs"]["top_logprobs"][:3] == [
            None,
            {"\n": -0.125, " cat": -0.25},
            {"The": -1.0, "水": -3.0},
        ]
        assert expected["logprobs"]["text_offset"][:3] == [0, 3, 7]


def _shown(value: Any) -> Any:
    return None if isinstance(value, dict) and not any(value.values()) else value


def test_a_hidden_first_token_has_no_characters() -> None:
    wanted = request("The cat", echo=True, logprobs=0)
    assert VOCABULARY[9] == b"<|e|>"
    outputs = [output("!", finish=FinishReason.LENGTH, logprobs=[], prompt_logprobs=[lp(0), lp(1)])]
    assert whole(outputs, wanted, [9, 0, 1])["logprobs"]["text_offset"] == [0, 0, 3]


def test_prompt_logprobs_name_tokens_ranks_and_the_first_as_unknown() -> None:
    outputs = [
        output("!", finish=FinishReason.STOP, prompt_logprobs=[lp(1, -0.5, [(1, -0.5)]), lp(8, -7.0, [(0, -1.0)])])
    ]
    assert whole(outputs, request(prompt_logprobs=1))["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -0.5, "rank": 1, "decoded_token": " cat"}},
        {
            "8": {"logprob": -7.0, "rank": 1, "decoded_token": "bytes:\\xff"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": "The"},
        },
    ]
