"""Paths without /v1, and what tells one model in one form from another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.harness import Server
from tests.support.tiny_model import NAME, tiny_server, write_tiny_model

QUESTION: Any = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": QUESTION, "max_tokens": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / NAME)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0]['content'] }}",
        "vocab_file": "/secret/vocab.json",
        "name_or_path": "/secret/model",
        "special_tokens_map_file": "/secret/map.json",
        "add_prefix_space": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with tiny_server(model=directory, max_model_len=96, api_keys="key", enable_tokenizer_info_endpoint=True) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Server]:
    with tiny_server(max_model_len=96, dtype="float32") as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_sdks_work_with_a_base_url_without_v1(server: Server) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="key", max_retries=0) as sdk:
        assert sdk.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=2).choices
        assert sdk.completions.create(model=NAME, prompt="Hi", max_tokens=2).choices
        assert sdk.embeddings.create(model=NAME, input="Hi").data
        assert sdk.models.list().data == [sdk.models.retrieve(NAME)]
        kept = sdk.responses.create(model=NAME, input="Hi", max_output_tokens=2)
        assert sdk.responses.retrieve(kept.id).id == kept.id
    answer = server.post("/messages", CHAT, authorization="Bearer key")
    assert answer.json()["type"] == "message"
    assert "/v1/messages" in server.client.get("/metrics", headers={"authorization": "Bearer key"}).text
    assert 'handler="/messages"' not in server.client.get("/metrics", headers={"authorization": "Bearer key"}).text


def test_keys_and_errors_are_those_of_the_path_with_v1(server: Server) -> None:
    for path in ("/chat/completions", "/messages", "/responses", "/models", "/messages/nothing"):
        answer = server.post(path, CHAT)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert ("request_id" in answer.json()) == path.startswith("/messages")
    key = {"x-api-key": "key"}
    assert server.post("/messages", {}, **key).json()["type"] == "error"
    assert server.post("/messages/nothing", {}, **key).json()["error"]["type"] == "not_found_error"
    assert server.client.get("/chat/completions", headers=key).status_code == 405
    assert server.client.get("/completionsx", headers=key).status_code == 404


def test_the_tokenizer_is_described_without_paths(server: Server) -> None:
    assert server.client.get("/tokenizer_info").status_code == 401
    answer = server.client.get("/tokenizer_info", headers={"x-api-key": "key"})
    assert answer.json() == {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0]['content'] }}",
        "add_prefix_space": False,
    }


def fingerprints(server: Server, **headers: str) -> str:
    """The one that all of its answers and chunks have."""
    found = set()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a", "max_tokens": 2})):
        found.add(server.post(path, body, **headers).json()["system_fingerprint"])
        answer = server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}, **headers)
        lines = answer.text.split("\n\n")
        found |= {json.loads(line[6:])["system_fingerprint"] for line in lines if line.startswith("data: {")}
    assert len(found) == 1
    return found.pop()


@pytest.mark.slow
def test_the_fingerprint_outlives_the_server_and_tells_models_and_forms_apart(
    server: Server, plain_server: Server, directory: Path
) -> None:
    key = {"authorization": "Bearer key"}
    found = fingerprints(server, **key)
    assert found.startswith("fp_")
    with tiny_server(model=directory, max_model_len=64, max_num_seqs=2) as again:
        again.wait_ready()
        assert fingerprints(again) == found
    with tiny_server(model=directory, max_model_len=64, dtype="float32") as other_form:
        other_form.wait_ready()
        assert fingerprints(other_form) not in (found, fingerprints(plain_server))  # nor the same with another template
