"""Rerankers and classifiers with a head, and vectors of tokens, against transformers in float32 on the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headrace import LLM, InvalidRequest
from tests.gpu.encoder_models import ENCODERS, hidden_states, make_checkpoint, word_tokenizer
from tests.support.harness import Server

LONGEST = 66
QUERY = "the cat sat, the mat"
DOCUMENTS = ["a mat", "on the cat!", "", "dogs sit on mats", "the the the", "[SEP] no cat"]
LABELS = {"0": "bad", "1": "fair", "2": "good"}


class Checkpoint:
    """A checkpoint in a folder, and the logits that transformers computes for pairs and texts."""

    def __init__(self, directory: Path, kind: str, labels: int, **config: Any) -> None:
        self.directory = directory
        self.model = make_checkpoint(directory, ENCODERS[kind], labels=labels)
        values = json.loads((directory / "config.json").read_text()) | config
        (directory / "config.json").write_text(json.dumps(values))
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=word_tokenizer(), model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        )
        self._has_types = "token_type" in kind or kind == "bert"

    def logits(self, texts: Sequence[Any], longest: int = LONGEST) -> Any:
        rows = []
        for text in texts:
            pair = text if isinstance(text, tuple) else (text, None)
            pair = tuple(None if each is None else each.replace("[SEP]", "[ sep ]") for each in pair)
            inputs = self._tokenizer(
                *([each] for each in pair if each is not None),
                truncation="longest_first",
                max_length=longest,
                return_tensors="pt",
            )
            kept = ("input_ids", "token_type_ids") if self._has_types else ("input_ids",)
            with torch.no_grad():
                rows.append(self.model(**{name: inputs[name] for name in kept}).logits[0].numpy())
        return np.stack(rows)

    def serve(self) -> Server:
        return Server(model=str(self.directory), device="cpu", dtype="float32", max_model_len=LONGEST)


@pytest.fixture(scope="module", params=["bert", "roberta", "distilbert"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), request.param, 1)


@pytest.fixture(scope="module")
def server(reranker: Checkpoint) -> Iterator[Server]:
    with reranker.serve() as running:
        yield running.wait_ready()


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def relevance(server: Server, documents: Sequence[str], path: str = "/v1/rerank", **fields: Any) -> Any:
    answer = server.post(path, {"query": QUERY, "documents": documents, **fields})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert results == sorted(results, key=lambda each: -each["relevance_score"])
    return np.array([each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])])


def test_relevance_is_that_of_transformers(reranker: Checkpoint, server: Server) -> None:
    logits = reranker.logits([(QUERY, each) for each in DOCUMENTS])[:, 0]
    assert logits.std() > 0.01
    np.testing.assert_allclose(relevance(server, DOCUMENTS), sigmoid(logits), atol=1e-5)
    np.testing.assert_allclose(relevance(server, DOCUMENTS, raw_scores=True), logits, atol=1e-4)
    data = server.post("/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}).raise_for_status().json()["data"]
    expected = sigmoid(reranker.logits(list(zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)))[:, 0])
    np.testing.assert_allclose([each["score"] for each in data], expected, atol=1e-5)


def test_the_library_scores_as_transformers_does(reranker: Checkpoint) -> None:
    pairs = [(QUERY, each) for each in [*DOCUMENTS, "a cat sat on the mat " * 20]]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": LONGEST, "progress": False}
    with LLM(str(reranker.directory), **settings) as llm:
        logits = llm.score(QUERY, [each for _, each in pairs], raw_scores=True, truncate=True)
        scores = llm.score(QUERY, DOCUMENTS)
        with pytest.raises(InvalidRequest, match="context length is 66"):
            llm.score(QUERY, pairs[-1][1])
    np.testing.assert_allclose(logits, reranker.logits(pairs)[:, 0], atol=1e-4)
    np.testing.assert_allclose(scores, sigmoid(np.array(logits[:-1])), atol=1e-5)


def test_pairs_are_truncated_longest_first(reranker: Checkpoint, server: Server) -> None:
    documents = ["the cat " * 60, "cats " * 20, "on"]
    for query in (QUERY, "mat sat on " * 30):
        pairs = [(query, each) for each in documents]
        for fields, longest in (({"truncate": True}, LONGEST), ({"truncate_prompt_tokens": 31}, 31)):
            expected = sigmoid(reranker.logits(pairs, longest)[:, 0])
            np.testing.assert_allclose(relevance(server, documents, **fields | {"query": query}), expected, atol=1e-5)
    refused = server.post("/v1/rerank", {"query": QUERY, "documents": ["on", documents[0]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents.1")
    expected = sigmoid(reranker.logits([(QUERY, "the cat on the")])[:, 0])
    cut = relevance(server, ["the cat on the mat"], "/v2/rerank", max_tokens_per_doc=4)
    np.testing.assert_allclose(cut, expected, atol=1e-5)
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": ["on"], "instruction": "Find"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instruction")


def test_labels_and_their_probabilities(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "bert", 3, id2label=LABELS)
    texts = ["a mat", "on the cat!", "dogs sit on mats"]
    logits = checkpoint.logits(texts)
    with checkpoint.serve() as server:
        server.wait_ready()
        data = server.post("/classify", {"input": texts}).raise_for_status().json()["data"]
        powers = np.exp(logits)
        np.testing.assert_allclose([each["probs"] for each in data], powers / powers.sum(1, keepdims=True), atol=1e-5)
        assert [each["label"] for each in data] == [[*LABELS.values()][best] for best in logits.argmax(1)]
        raw = server.post("/classify", {"input": texts, "raw_scores": True}).json()["data"]
        np.testing.assert_allclose([each["probs"] for each in raw], logits, atol=1e-4)
        long = {"input": "the cat " * 60}
        assert server.post("/classify", long).json()["error"]["param"] == "input"
        cut = server.post("/classify", long | {"truncate": True, "raw_scores": True}).json()["data"]
        np.testing.assert_allclose(cut[0]["probs"], checkpoint.logits([long["input"]])[0], atol=1e-4)
        answer = server.post("/v1/rerank", {"query": "a", "documents": ["b"]})
        assert (answer.status_code, "3 labels" in answer.json()["detail"]) == (400, True)


def test_scores_are_logits_if_the_configuration_says_identity(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    checkpoint = Checkpoint(tmp_path, "bert", 1, sentence_transformers=identity)
    logits = checkpoint.logits([(QUERY, each) for each in DOCUMENTS])[:, 0]
    with checkpoint.serve() as server:
        np.testing.assert_allclose(relevance(server.wait_ready(), DOCUMENTS), logits, atol=1e-4)


def test_vectors_of_tokens(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS["bert"])
    with Server(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=LONGEST) as server:
        server.wait_ready()
        data = server.post("/pooling", {"input": DOCUMENTS[:2]}).raise_for_status().json()["data"]
    for text, item in zip(DOCUMENTS, data, strict=False):
        rows = hidden_states(model, word_tokenizer().encode(text).ids)
        np.testing.assert_allclose(item["data"], rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-5)
