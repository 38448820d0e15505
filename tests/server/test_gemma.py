"""A real model with windows and a SentencePiece tokenizer behind a real server, as it is served by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.gemma_model import CONTINUATIONS, gemma_gguf
from tests.server.harness import Server

COMPLETIONS = "/v1/completions"
LONG = "".join(f"Item {number}: a mill number {number * 7919 % 1000} at the river.\n" for number in range(70)) + "Item"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(model=gemma_gguf(), max_num_seqs=8) as server:
        yield server.wait_ready()


def body(prompt: object, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0} | more


def test_texts_are_gone_on_with_as_transformers_does(server: Server) -> None:
    answer = server.post(COMPLETIONS, body(list(CONTINUATIONS))).json()
    assert [choice["text"] for choice in answer["choices"]] == list(CONTINUATIONS.values())


def test_a_stream_of_emoji_has_no_broken_character(server: Server) -> None:
    (prompt,) = (text for text in CONTINUATIONS if "☀️" in text)
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    stream = client.completions.create(
        model="gemma-3-270m-q4_k_m", prompt=prompt, max_tokens=12, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == CONTINUATIONS[prompt]
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
