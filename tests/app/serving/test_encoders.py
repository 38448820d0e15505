"""A server of an encoder: embeddings in every form, truncation, thousands of inputs, and what it refuses."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.checkpoint.test_encoder_files import add_modules, write
from tests.gpu.encoder_models import ENCODERS, cosine, hidden_states, make_checkpoint, word_tokenizer
from tests.support.harness import Server

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on the mat", "a mat, a cat!", "on"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("encoder")
    model = make_checkpoint(directory, ENCODERS["bert"])
    add_modules(directory, "Pooling", include_prompt=False)
    write(directory, "config_sentence_transformers.json", {"prompts": {"query": "the cat "}})
    return directory, model


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any]) -> Iterator[Server]:
    with Server(model=str(model[0]), device="cpu", dtype="float32", max_queued_requests=64, max_model_len=66) as server:
        yield server.wait_ready()


def vectors(server: Server, **body: Any) -> list[NDArray[Any]]:
    answer = server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [np.array(each["embedding"]) for each in answer.json()["data"]]


def refused(server: Server, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.fixture(scope="module")
def wanted(model: tuple[Path, Any]) -> list[NDArray[np.float32]]:
    return [hidden_states(model[1], word_tokenizer().encode(text).ids).mean(0) for text in TEXTS]


def test_vectors_are_those_of_transformers(server: Server, wanted: list[NDArray[np.float32]]) -> None:
    found = vectors(server, input=TEXTS)
    assert min(map(cosine, found, wanted)) > 0.999999
    assert all(abs(np.linalg.norm(each) - 1) < 1e-5 for each in found)


@pytest.mark.parametrize("pooling", ["cls", "last", "weighted_mean"])
def test_a_request_chooses_the_pooling(server: Server, model: tuple[Path, Any], pooling: str) -> None:
    (found,) = vectors(server, input=TEXTS[0], pooling=pooling)
    rows = hidden_states(model[1], word_tokenizer().encode(TEXTS[0]).ids)
    places = np.arange(1, len(rows) + 1)[:, None]
    kinds = {"cls": rows[0], "last": rows[-1], "weighted_mean": (rows * places).sum(0)}
    assert cosine(found, kinds[pooling]) > 0.999999


def test_a_prompt_is_left_out_of_the_mean_if_the_authors_say_so(server: Server, model: tuple[Path, Any]) -> None:
    (found,) = vectors(server, input="sat", prompt_name="query")
    assert cosine(found, hidden_states(model[1], word_tokenizer().encode("the cat sat").ids)[3:].mean(0)) > 0.999999


def test_vectors_come_as_numbers_of_8_bits_as_signs_and_in_base64(
    server: Server, wanted: list[NDArray[np.float32]]
) -> None:
    unit = wanted[0] / np.linalg.norm(wanted[0])
    (of_8_bits,) = vectors(server, input=TEXTS[0], encoding_format="int8", normalize=False)
    assert of_8_bits.dtype.kind == "i"
    assert np.abs(of_8_bits - np.rint(127 * unit)).max() <= 1
    (signs,) = vectors(server, input=TEXTS[0], encoding_format="binary")
    assert signs.tolist() == (np.packbits(unit > 0).astype(int) - 128).tolist()
    answer = server.client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert cosine(np.frombuffer(raw, "<f4"), unit) > 0.999999
    (short,) = vectors(server, input=TEXTS[0], dimensions=8)
    assert cosine(short, unit[:8]) > 0.999999


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_truncated(server: Server, model: tuple[Path, Any]) -> None:
    text = "the cat " * 400
    assert refused(server, input=text)["param"] == "input"
    ids = word_tokenizer().encode(text).ids
    for fields, count in (({"truncate": True}, 66), ({"truncate_prompt_tokens": 10}, 10)):
        (found,) = vectors(server, input=text, **fields)
        kept = [*ids[: count - 1], ids[-1]]  # with the special token at the end, as in sentence-transformers
        assert cosine(found, hidden_states(model[1], kept).mean(0)) > 0.999999
    (found,) = vectors(server, input=ids[:66])  # exactly as long as allowed
    assert cosine(found, hidden_states(model[1], ids[:66]).mean(0)) > 0.999999


def test_8192_inputs_are_one_request(server: Server) -> None:
    found = vectors(server, input=[TEXTS[number % 3] for number in range(8192)], dimensions=2)
    assert len(found) == 8192
    assert np.abs(found[8190] - found[0]).max() < 1e-4
    assert "8192" in refused(server, input=["a"] * 8193)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_text_is_not_generated(server: Server, path: str, body: dict[str, Any]) -> None:
    message = refused(server, path, **body)["message"]
    assert "encoder" in message
    assert "/v1/embeddings" in message
    assert server.setting("model") is None or Path(str(server.setting("model"))).name in message


def test_a_conversation_is_no_input(server: Server) -> None:
    assert refused(server, messages=[{"role": "user", "content": "a"}])["param"] == "messages"
