"""Clients of Ollama at a server: npm's `ollama`, LangChain's adapter, and requests as other adapters send them.

LlamaIndex, LiteLLM and Open WebUI bring too many packages to be installed here; their requests were recorded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ollama
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

from protocol.ollama.output import KEEP_ALIVE
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.gpu.encoder_models import ENCODERS, make_checkpoint
from tests.integration.clients.test_npm_clients import DIMENSIONS, QUESTION, drive
from tests.support.fake_hub import FakeHub
from tests.support.harness import MODEL, TIMEOUT, Server
from tests.support.tiny_model import NAME, tiny_server, write_tiny_model

LATEST = f"{MODEL}:latest"
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def answer(server: Server) -> dict[str, Any]:
    return server.chat(QUESTION, max_tokens=12)


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_npm_ollama(answer: dict[str, Any], server: Server) -> None:
    before = server.wait_idle()
    found = drive("ollama.mjs", server.base_url)
    assert found["models"] == [LATEST]
    assert found["loaded"] == [server.setting("max_model_len")]
    assert found["capabilities"] == ["completion", "tools"]
    assert tuple(map(int, found["version"].split("."))) >= (0, 6, 4)
    assert found["text"] == found["streamed"] == text_of(answer)
    counts = [answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]]
    assert found["counts"] == found["streamedCounts"] == counts
    assert found["reason"] == answer["choices"][0]["finish_reason"]
    assert found["aborted"] == "AbortError"
    assert found["completion"] == server.complete("One, two,", max_tokens=12)["choices"][0]["text"]
    assert found["embeddings"] == [DIMENSIONS, DIMENSIONS]
    assert found["form"]["city"] in ("Paris", "Rome")
    assert found["unknown"]["status"] == 404
    assert found["refused"]["status"] == 400
    assert "options.top_p" in found["refused"]["message"]
    assert found["pulling"] == "pulling manifest"
    assert "is no repository of the hub" in found["late"]["message"]
    assert server.wait_idle().aborted == before.aborted + 1


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    city: str


def test_langchain(answer: dict[str, Any], server: Server) -> None:
    usual: dict[str, Any] = {"model": MODEL, "base_url": server.base_url, "temperature": 0, "num_predict": 12}
    model = ChatOllama(**usual, validate_model_on_init=True)
    whole = model.invoke(QUESTION)
    assert whole.content == text_of(answer) == "".join(str(part.content) for part in model.stream(QUESTION))
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == answer["usage"]["completion_tokens"]
    assert whole.response_metadata["done_reason"] == "stop"
    history = [
        HumanMessage("What is the weather in Paris?"),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Paris"}, "id": "1"}]),
        ToolMessage("sunny", tool_call_id="1"),
    ]
    assert model.bind_tools([weather]).invoke(history).content
    longer = ChatOllama(**usual | {"num_predict": 60}).with_structured_output(Place, method="json_schema")
    assert isinstance(longer.invoke("Paris. Which city?"), Place)
    assert OllamaLLM(**usual).invoke(QUESTION) == text_of(answer)
    vectors = OllamaEmbeddings(model=MODEL, base_url=server.base_url).embed_documents(["a", "b"])
    assert [len(vector) for vector in vectors] == [DIMENSIONS, DIMENSIONS]


_FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "w",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {}}},
    },
}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-index, chat": (
        "/api/chat",
        {"stream": False, "options": {**GREEDY, "num_ctx": 4096}, "messages": ASKED, "tools": []},
    ),
    "llama-index, tools": (
        "/api/chat",
        {"stream": True, "options": {**GREEDY, "num_ctx": 4096}, "messages": ASKED, "tools": [_FUNCTION]},
    ),
    "litellm, ollama_chat": (
        "/api/chat",
        {"messages": [{**ASKED[0], "images": []}], "options": GREEDY, "stream": False, "format": "json"},
    ),
    "litellm, ollama": (
        "/api/generate",
        {"prompt": f"### User:\n{QUESTION}\n\n", "options": GREEDY, "stream": True, "images": []},
    ),
    "open webui, chat": (
        "/api/chat",
        {"model": LATEST, "messages": ASKED, "options": {**GREEDY, "stop": ["###"]}, "stream": True, "format": ""},
    ),
    "langchain, every option null": (
        "/api/chat",
        {"messages": ASKED, "options": {**GREEDY, **dict.fromkeys(("mirostat", "num_gpu", "tfs_z", "top_k"))}},
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_is_answered_without_a_warning(name: str, server: Server) -> None:
    path, body = RECORDED[name]
    found = server.post(path, {"model": MODEL, **body})
    assert found.status_code == 200, found.text
    assert "x-headrace-warning" not in found.headers
    kind = ollama.ChatResponse if path == "/api/chat" else ollama.GenerateResponse
    lines = [kind.model_validate_json(line) for line in found.text.splitlines()]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (len(lines) > 1) == body.get("stream", True)
    assert lines[-1].eval_count in range(1, 13)


# ------------------------------------------------------------------------------------------------------- a server's own


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    path = TinyGGUF(tmp_path / "t.gguf").add_weights(random_weights(TINY), "Q8_0").add_tokenizer().save()
    with FakeHub({"org/tiny-GGUF": {"tiny-Q8_0.gguf": path.read_bytes()}}, pause=0.1, chunk=20_000) as served:
        yield served


def test_pull_fetches_with_progress_and_ends_with_its_client(hub: FakeHub, tmp_path: Path) -> None:
    server = tiny_server(api_keys='["client"]', admin_keys='["admin"]', sse_keep_alive=0.2)
    server.environment = hub.environment(tmp_path)
    with server:
        server.wait_ready()
        client = ollama.Client(server.base_url, headers={"authorization": "Bearer client"}, trust_env=False)
        with pytest.raises(ollama.ResponseError, match="administrator"):
            client.pull("org/tiny-GGUF:q8_0")
        admin = ollama.Client(server.base_url, headers={"authorization": "Bearer admin"}, trust_env=False)
        leaving: Any = admin.pull("hf.co/org/tiny-GGUF:q8_0", stream=True)
        assert next(part for part in leaving if part.completed)
        leaving.close()
        parts = list(admin.pull("hf.co/org/tiny-GGUF:q8_0", stream=True))
        known = [(part.completed, part.total) for part in parts if part.total]
        assert known == sorted(known)
        assert known[-1][0] == known[-1][1]
        assert parts[-1].status == "success"
        assert list(tmp_path.glob("hub/*/snapshots/*/tiny-Q8_0.gguf"))
        with pytest.raises(ollama.ResponseError, match="no such repository"):
            admin.pull("org/none")


def test_a_long_input_is_cut_unless_the_client_forbids_it() -> None:
    with tiny_server(max_model_len=64) as server:
        server.wait_ready()
        client = ollama.Client(server.base_url, trust_env=False)
        long = "word " * 100
        assert client.embed(NAME, long).prompt_eval_count == 64
        for body in ({"input": long, "truncate": False}, {"input": long, "truncate": False, "dimensions": 4}):
            assert server.post("/api/embed", {"model": NAME, **body}).status_code == 400
        turns = [{"role": "user", "content": "word " * 5}] * 10
        answer = client.chat(NAME, turns, options={"num_predict": 2})
        assert answer.prompt_eval_count is not None
        assert answer.prompt_eval_count < 64
        forbidden = server.post("/api/chat", {"model": NAME, "messages": turns, "truncate": False})
        assert (forbidden.status_code, list(forbidden.json())) == (400, ["error"])


def test_a_silent_stream_is_kept_alive_and_a_late_error_is_a_line() -> None:
    with tiny_server(max_num_seqs=1, sse_keep_alive=0.2) as server:
        server.wait_ready()
        blocker = threading.Thread(
            target=server.post,
            args=("/v1/completions", {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "timeout": 3}),
        )
        blocker.start()
        server.wait_until(lambda metrics: metrics.running == 1)
        body = {"model": NAME, "messages": ASKED, "timeout": 1.5}
        data = server.post("/api/chat", body).content
        blocker.join(TIMEOUT)
        assert data.startswith(KEEP_ALIVE)
        *lines, last = map(json.loads, data.splitlines())
        assert all(line["message"]["content"] == "" for line in lines)
        assert "did not finish in time" in last["error"] or "deadline" in last["error"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, context in (("one", 1024), ("two", 2048)):
        write_tiny_model(folder / name, max_position_embeddings=context, vocab_size=512)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


def several(folder: Path, **settings: Any) -> Server:
    usual = {"models_dir": folder, "load_format": "dummy", "max_model_len": "", "model": "", "dtype": "float32"}
    return Server(**{**usual, "kv_cache_memory": "64MiB", **settings})


def test_models_come_and_go_as_clients_ask(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()
        client = ollama.Client(server.base_url, trust_env=False)

        def loaded() -> list[str | None]:
            return [each.model for each in client.ps().models]

        listed = {each.model: each for each in client.list().models}
        assert {"one:latest", "two:latest"} <= listed.keys()
        assert listed["one:latest"].digest != listed["two:latest"].digest
        shown = client.show("two")
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == 2048
        assert shown.capabilities == ["completion", "tools"]
        assert loaded() == [], "lists load nothing"
        assert client.generate("one", keep_alive=0).done_reason == "unload"
        assert loaded() == [], "what is not loaded is not loaded to be unloaded"

        assert client.chat("one", []).done_reason == "load"
        assert loaded() == ["one:latest"]
        parts = list(client.chat("two:latest", ASKED, options={"num_predict": 2}, keep_alive="10m", stream=True))
        assert parts[-1].eval_count == 2
        assert parts[-1].load_duration
        expires = {each.model: each.expires_at for each in client.ps().models}
        assert expires["one:latest"] is not None
        assert expires["one:latest"].year == 9999
        assert expires["two:latest"] is not None
        left = expires["two:latest"] - datetime.now(UTC)
        assert timedelta(minutes=9) < left <= timedelta(minutes=10)
        assert client.chat("one", [], keep_alive=0).done_reason == "unload"
        server.poll(loaded, lambda names: names == ["two:latest"])
        client.embed("two", "a", keep_alive=0.3)
        server.poll(loaded, lambda names: names == [])
        assert len(client.embed("one", "a").embeddings[0]) > 0
        for name in ("nothing", "broken"):
            with pytest.raises(ollama.ResponseError, match=name):
                client.chat(name, ASKED)


def test_tenants_do_not_unload_what_others_use(folder: Path) -> None:
    with several(folder, api_keys="client") as server:
        server.wait_ready()
        client = ollama.Client(server.base_url, headers={"authorization": "Bearer client"}, trust_env=False)
        assert client.chat("one", [], keep_alive=1).done_reason == "load"
        with pytest.raises(ollama.ResponseError, match="clients cannot unload this model here"):
            client.chat("one", [], keep_alive=0)
        assert [each.model for each in client.ps().models] == ["one:latest"]


def test_an_encoder_is_for_embeddings(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["bert"])
    with Server(model=tmp_path, device="cpu", dtype="float32", max_model_len=66) as server:
        server.wait_ready()
        client = ollama.Client(server.base_url, trust_env=False)
        assert client.show(tmp_path.name).capabilities == ["embedding"]
        [vector] = client.embed(tmp_path.name, "the cat " * 200).embeddings
        assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
        with pytest.raises(ollama.ResponseError, match="is an encoder"):
            client.chat(tmp_path.name, ASKED)
