"""A Qwen3-Reranker against transformers: random weights in float32, the code of the model card, and the real server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.support.harness import Server
from tests.support.serve_command import ServeCommand
from tests.support.tiny_model import CONTEXT, tiny_server, write_tiny_model

START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
USUAL = "Given a web search query, retrieve relevant passages that answer the query"
WORDS = "the river bends north past old mills, 12 boats & a ferry; naïve 日本 crossing.\nNobody".split()  # noqa: SIM905
QUERY = "Who pays for the ferry?"


def texts(count: int, longest: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


class Reference:
    """The scores of the model card's code."""

    def __init__(self, directory: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(directory / "tokenizer.json"))
        )
        self._tokens = [self._tokenizer.convert_tokens_to_ids(each) for each in ("no", "yes")]

    def log_odds(self, pairs: Sequence[tuple[str, str]], instruction: str = USUAL, longest: int = CONTEXT - 1) -> Any:
        start, end = (self._tokenizer.encode(each, add_special_tokens=False) for each in (START, END))
        found = []
        for query, document in pairs:
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            inside = self._tokenizer(
                text, truncation="longest_first", max_length=longest - len(start) - len(end), add_special_tokens=False
            )["input_ids"]
            with torch.inference_mode():
                logits = self._model(torch.tensor([[*start, *inside, *end]])).logits[0, -1]
            found.append(float(logits[self._tokens[1]] - logits[self._tokens[0]]))
        return np.array(found)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published model's name. Large weights let scores differ."""
    made = write_tiny_model(tmp_path_factory.mktemp("models") / "Qwen3-Reranker-0.6B")
    torch.manual_seed(7)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "vocab_size": 49152,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    config = Qwen3Config(**shape, **heads, initializer_range=0.3, eos_token_id=2, bos_token_id=1)
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def reranker(directory: Path) -> Iterator[Server]:
    with tiny_server(model=directory, load_format="auto", dtype="float32", kv_cache_memory="64MiB") as server:
        yield server.wait_ready()


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def ranked(server: Server, documents: Sequence[Any], path: str = "/v1/rerank", **fields: Any) -> dict[str, Any]:
    answer = server.post(path, {"query": QUERY, "documents": documents, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def by_index(body: dict[str, Any]) -> Any:
    results = sorted(body["results"], key=lambda each: each["index"])
    return np.array([each["relevance_score"] for each in results])


def test_scores_and_their_order_are_those_of_transformers(reranker: Server, reference: Reference) -> None:
    documents = texts(40, 60)
    logits = reference.log_odds([(QUERY, each) for each in documents])
    assert logits.std() > 0.1
    body = ranked(reranker, documents)
    np.testing.assert_allclose(by_index(body), sigmoid(logits), atol=1e-4)
    order = [each["index"] for each in body["results"]]
    expected = np.argsort(-logits)
    apart = np.abs(np.diff(logits[expected])).min()
    assert apart < 1e-3 or order == expected.tolist()
    np.testing.assert_allclose(by_index(ranked(reranker, documents, raw_scores=True)), logits, atol=1e-3)


def test_an_instruction_replaces_the_usual_one(reranker: Server, reference: Reference) -> None:
    documents, instruction = texts(6, 30, seed=1), "Find who pays"
    logits = reference.log_odds([(QUERY, each) for each in documents], instruction)
    np.testing.assert_allclose(
        by_index(ranked(reranker, documents, instruction=instruction)), sigmoid(logits), atol=1e-4
    )


def test_truncation_cuts_the_document_as_the_model_card_does(reranker: Server, reference: Reference) -> None:
    documents = texts(6, 200, seed=2)
    logits = reference.log_odds([(QUERY, each) for each in documents], longest=128)
    np.testing.assert_allclose(
        by_index(ranked(reranker, documents, truncate_prompt_tokens=128)), sigmoid(logits), atol=1e-4
    )
    long = " ".join(texts(200, 200, seed=3))
    refused = reranker.post("/v1/rerank", {"query": QUERY, "documents": ["a", long]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents.1")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    whole = reference.log_odds([(QUERY, long)])
    for fields in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        np.testing.assert_allclose(by_index(ranked(reranker, [long], **fields)), sigmoid(whole), atol=1e-4)
    assert ranked(reranker, [long], "/v2/rerank")["usage"]["prompt_tokens"] < 4096 + 128


def test_scores_of_pairs(reranker: Server, reference: Reference) -> None:
    queries, documents = texts(3, 8, seed=4), texts(3, 30, seed=5)
    logits = reference.log_odds(list(zip(queries, documents, strict=True)))
    data = reranker.post("/score", {"text_1": queries, "text_2": documents}).raise_for_status().json()["data"]
    assert [each["index"] for each in data] == [0, 1, 2]
    np.testing.assert_allclose([each["score"] for each in data], sigmoid(logits), atol=1e-4)
    one = reranker.post("/v1/score", {"text_1": queries[0], "text_2": documents}).raise_for_status().json()["data"]
    logits = reference.log_odds([(queries[0], each) for each in documents])
    np.testing.assert_allclose([each["score"] for each in one], sigmoid(logits), atol=1e-4)


def test_coheres_clients_read_the_answers(reranker: Server) -> None:
    documents = texts(8, 30, seed=9)
    expected = ranked(reranker, documents)["results"]
    client = cohere.ClientV2(api_key="any", base_url=reranker.base_url)
    found = client.rerank(model="Qwen3-Reranker-0.6B", query=QUERY, documents=documents, top_n=3)
    assert [(each.index, each.relevance_score) for each in found.results] == [
        (each["index"], each["relevance_score"]) for each in expected[:3]
    ]
    assert found.id is not None
    assert found.meta is not None
    old = cohere.Client(api_key="any", base_url=reranker.base_url)
    shown = old.rerank(query=QUERY, documents=[{"text": each} for each in documents], return_documents=True).results
    assert [each.document.text for each in shown if each.document] == [each["document"]["text"] for each in expected]
    with pytest.raises(cohere.BadRequestError) as refused:
        client.rerank(model="Qwen3-Reranker-0.6B", query=QUERY, documents=[])
    assert "documents" in refused.value.body["message"]
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="rerank-v3.5", query=QUERY, documents=documents)


def test_a_thousand_documents_are_ranked_in_bounded_memory(reranker: Server, reference: Reference) -> None:
    documents = texts(1000, 20, seed=6)
    body = ranked(reranker, documents)
    logits = reference.log_odds([(QUERY, each) for each in documents[:50]])
    np.testing.assert_allclose(by_index(body)[:50], sigmoid(logits), atol=1e-4)
    assert len(body["results"]) == 1000
    reranker.wait_idle()


def test_vectors_of_tokens_are_the_hidden_states(reranker: Server, directory: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().model
    inputs = [[5, 6, 7, 8], [9, 10]]
    for normalize in (True, False):
        data = reranker.post("/pooling", {"input": inputs, "normalize": normalize}).raise_for_status().json()["data"]
        for token_ids, item in zip(inputs, data, strict=True):
            with torch.inference_mode():
                hidden = model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
            expected = hidden / np.linalg.norm(hidden, axis=1, keepdims=True) if normalize else hidden
            np.testing.assert_allclose(item["data"], expected, atol=1e-4 * np.abs(expected).max())


def test_the_conversion_of_vllm_gives_the_same_scores(directory: Path, reranker: Server, tmp_path: Path) -> None:
    converted = tmp_path / "converted"
    converted.mkdir()
    for file in directory.iterdir():
        (converted / file.name).symlink_to(file)
    (converted / "config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    (converted / "config.json").write_text(json.dumps(config))
    documents = texts(5, 20, seed=8)
    with tiny_server(model=converted, load_format="auto", dtype="float32") as server:
        server.wait_ready()
        np.testing.assert_allclose(
            by_index(ranked(server, documents)), by_index(ranked(reranker, documents)), atol=1e-6
        )


def test_a_reranker_beside_a_chat_model_is_chosen_by_name_and_named_in_refusals(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "chat")
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
    write_tiny_model(tmp_path / "qwen3-reranker", **qwen3)
    settings: dict[str, Any] = {"models_dir": tmp_path, "load_format": "dummy", "max_model_len": "", "model": ""}
    with ServeCommand(**settings, kv_cache_memory="64MiB", dtype="float32") as server:
        server.wait_ready()
        asked = {"query": QUERY, "documents": ["a", "b"]}
        assert "Qwen/" in server.post("/v1/rerank", {**asked, "model": "chat"}).json()["detail"]
        assert server.post("/v1/rerank", {**asked, "model": "qwen3-reranker"}).status_code == 200
        assert "Ask qwen3-reranker" in server.post("/v1/rerank", {**asked, "model": "chat"}).json()["detail"]
