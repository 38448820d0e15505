"""What an answer repeats of its prompt, however the outputs come: one by one, merged, streamed or whole."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, RequestOutput
from protocol.openai.completions import COMPLETION
from protocol.openai.output import ChunkStream, Collector
from protocol.openai.prompt_parts import PromptParts
from tests.protocol.wire_helpers import HEAD, VOCABULARY, events, lp, output, positions, texts, token_bytes

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


def parts(**fields: Any) -> PromptParts:
    return PromptParts(token_ids=[PROMPT], **fields)


def streamed(outputs: list[RequestOutput], wanted: PromptParts) -> dict[str, Any]:
    chunks = ChunkStream(COMPLETION, HEAD, token_bytes, parts=wanted)
    found = events(b"".join([*map(chunks.feed, outputs), chunks.end()]))
    choices = [chunk["choices"][0] for chunk in found]
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, column in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(column)
    prompts = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
    assert len(prompts) == wanted.return_token_ids
    return {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": columns or None,
        "token_ids": [token for choice in choices for token in choice.get("token_ids", ())] or None,
        "prompt_token_ids": prompts[0] if prompts else None,
    }


def whole(outputs: list[RequestOutput], wanted: PromptParts) -> dict[str, Any]:
    collector = Collector(COMPLETION, HEAD, token_bytes, parts=wanted)
    for each in outputs:
        collector.feed(each)
    return orjson.loads(collector.body())["choices"][0]


@given(outputs=one_choice(), echo=st.booleans(), ids=st.booleans(), data=st.data())
def test_streamed_merged_or_whole_it_is_the_same(
    outputs: list[RequestOutput], echo: bool, ids: bool, data: st.DataObject
) -> None:
    wanted = parts(echo=["The cat水"] if echo else None, echo_logprobs=1 if echo else None, return_token_ids=ids)
    answer = whole(outputs, wanted)
    for way in (outputs, data.draw(merged(outputs))):
        found = streamed([msgspec.structs.replace(each) for each in way], wanted)
        for name, value in found.items():
            assert (value or None) == (_shown(answer[name]) or None), name
    if echo:
        assert answer["text"].startswith("The cat水")
        assert answer["logprobs"]["tokens"][:3] == ["The", " cat", "水"]
        assert answer["logprobs"]["token_logprobs"][:3] == [None, -0.25, -3.0]
        assert answer["logprobs"]["top_logprobs"][:3] == [
            None,
            {"\n": -0.125, " cat": -0.25},
            {"The": -1.0, "水": -3.0},
        ]
        assert answer["logprobs"]["text_offset"][:3] == [0, 3, 7]


def _shown(value: Any) -> Any:
    return None if isinstance(value, dict) and not any(value.values()) else value


def test_a_hidden_first_token_has_no_characters() -> None:
    wanted = PromptParts(token_ids=[[9, 0, 1]], echo=["The cat"], echo_logprobs=0)
    assert VOCABULARY[9] == b"<|e|>"
    outputs = [output("!", finish=FinishReason.LENGTH, logprobs=[], prompt_logprobs=[lp(0), lp(1)])]
    assert whole(outputs, wanted)["logprobs"]["text_offset"] == [0, 0, 3]


def test_prompt_logprobs_name_tokens_ranks_and_the_first_as_unknown() -> None:
    outputs = [
        output("!", finish=FinishReason.STOP, prompt_logprobs=[lp(1, -0.5, [(1, -0.5)]), lp(8, -7.0, [(0, -1.0)])])
    ]
    assert whole(outputs, parts(prompt_logprobs=1))["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -0.5, "rank": 1, "decoded_token": " cat"}},
        {
            "8": {"logprob": -7.0, "rank": 1, "decoded_token": "bytes:\\xff"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": "The"},
        },
    ]
