"""A stream, put together, is the whole answer: text, log-probabilities, ids, reasons, usage.

The model's weights are random, so at a temperature it speaks broken bytes; a bias makes it speak pieces of emoji and
of Chinese instead. Stop strings are cut out of what it says: over one to six tokens, through the middle of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpu.checkpoint import open_model
from tests.support.harness import MODEL, Server
from tests.support.streams import Streamed, stream
from tests.support.tiny_model import tiny_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What the model may say: anything, or only the tokens of one of these.
TONGUES = ["", "👩‍👩‍👧‍👦🏳️‍🌈👍🏽", "水は高きより低きに流る。", "naïve Straße 🐈‍⬛ 'end'\n"]
CHANCE = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

_salts = map(str, itertools.count())


@pytest.fixture(scope="module")
def babbler() -> Iterator[Server]:
    with tiny_server() as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model(MODEL).tokenizer


@pytest.mark.slow
@given(data=st.data())
@CHANCE
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_is_the_whole_answer(babbler: Server, tokenizer: Tokenizer, path: str, data: st.DataObject) -> None:
    tongue = data.draw(st.sampled_from(TONGUES))
    n = data.draw(st.sampled_from([1, 1, 3]))
    fields: dict[str, Any] = {
        "max_tokens": data.draw(st.integers(1, 24)),
        "temperature": data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "seed": data.draw(st.integers(0, 2**31)),
        "n": n,
        "ignore_eos": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "return_token_ids": data.draw(st.booleans()),
    }
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": "Hi"}]
        fields |= data.draw(st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]))
    else:
        fields["prompt"] = ["Hi", "Once upon"]
        fields |= data.draw(st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 2, "echo": True}, {"echo": True}]))
    if tongue:
        ids = tokenizer.encode(tongue, add_special_tokens=False).ids
        fields["logit_bias"] = dict.fromkeys(map(str, ids), 100)

    free = ask(babbler, path, fields | {"return_token_ids": True})
    if data.draw(st.booleans()):
        fields["stop"] = data.draw(
            st.lists(stop_in(tokenizer, free["choices"][0]["token_ids"]), min_size=1, max_size=3)
        )
    whole = ask(babbler, path, fields)
    parts = stream(babbler, path, fields | {"cache_salt": next(_salts)})

    assert_equal(parts, whole)
    if "stop" in fields:
        for choice in whole["choices"]:
            if choice["stop_reason"] is not None:
                assert (choice["finish_reason"], choice["stop_reason"] in fields["stop"]) == ("stop", True)


def ask(server: Server, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    # Nobody finds anything in the cache: what is computed again in other pieces may differ in the last bit.
    answer = server.post(path, fields | {"cache_salt": next(_salts)})
    assert answer.status_code == 200, answer.text
    return answer.json()


@st.composite
def stop_in(draw: st.DrawFn, tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """A stop string that begins and ends anywhere within one to six tokens of what was said; never empty."""
    length = draw(st.integers(1, min(6, len(token_ids))))
    start = draw(st.integers(0, len(token_ids) - length))
    text = tokenizer.decode(token_ids[start : start + length], skip_special_tokens=False)
    first = draw(st.integers(0, max(0, len(text) - 1)))
    return text[first : first + draw(st.integers(1, max(1, len(text))))] or "never"


def assert_equal(parts: Streamed, whole: dict[str, Any]) -> None:
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    assert parts.usage is not None
    assert [parts.usage[name] for name in counts] == [whole["usage"][name] for name in counts]
    assert len(parts.choices) == len(whole["choices"])
    for part, choice in zip(parts.choices, whole["choices"], strict=True):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert part.text == text
        assert (part.finish_reason, part.stop_reason) == (choice["finish_reason"], choice["stop_reason"])
        assert part.token_ids == (choice["token_ids"] or [])
        logprobs = choice["logprobs"] and {name: each for name, each in choice["logprobs"].items() if each is not None}
        assert (part.logprobs or None) == (logprobs or None)
