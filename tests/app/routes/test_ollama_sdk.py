"""The `ollama` package against /api: its answers are those of /v1 to the same request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.support.harness import MODEL, TIMEOUT, Server
from tests.support.tiny_model import tiny_server

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def sdk(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.base_url, timeout=TIMEOUT, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def chat(server: Server) -> dict[str, Any]:
    return server.chat(QUESTION, max_tokens=12)


def refusal(call: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as caught:
        call()
    return caught.value


def test_chat_is_the_same_streamed_whole_and_under_v1(sdk: ollama.Client, chat: dict[str, Any]) -> None:
    whole = sdk.chat(MODEL, MESSAGES, options=GREEDY)
    parts = list(sdk.chat(MODEL, MESSAGES, options=GREEDY, stream=True))
    text = chat["choices"][0]["message"]["content"]
    assert whole.message.content == "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for end in (whole, parts[-1]):
        assert (end.done, end.done_reason) == (True, chat["choices"][0]["finish_reason"])
        counts = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
        assert (end.prompt_eval_count, end.eval_count) == counts
        assert end.load_duration is not None
        assert end.prompt_eval_duration is not None
        assert end.eval_duration is not None
        assert end.total_duration == end.load_duration + end.prompt_eval_duration + end.eval_duration > 0


def test_generate_is_a_chat_of_one_turn_or_raw_a_completion(
    sdk: ollama.Client, server: Server, chat: dict[str, Any]
) -> None:
    assert sdk.generate(MODEL, QUESTION, options=GREEDY).response == chat["choices"][0]["message"]["content"]
    raw = sdk.generate(MODEL, "One, two,", raw=True, options=GREEDY, logprobs=True, top_logprobs=2)
    told = server.complete("One, two,", max_tokens=12)["choices"][0]
    assert raw.response == told["text"]
    assert raw.done_reason == told["finish_reason"] == "length"
    assert raw.logprobs is not None
    assert "".join(each.token for each in raw.logprobs) == raw.response
    assert all(each.top_logprobs and len(each.top_logprobs) == 2 for each in raw.logprobs)


def test_vectors_are_those_of_v1_and_the_older_form_is_not_normalized(sdk: ollama.Client, server: Server) -> None:
    texts = ["A sentence.", "Another one."]
    found = sdk.embed(MODEL, texts, dimensions=64)
    told = server.post("/v1/embeddings", {"model": MODEL, "input": texts, "dimensions": 64}).json()
    assert [list(each) for each in found.embeddings] == [each["embedding"] for each in told["data"]]
    assert found.prompt_eval_count == told["usage"]["prompt_tokens"]
    raw = {"model": MODEL, "input": texts[0], "normalize": False}
    older = server.post("/v1/embeddings", raw).json()["data"][0]["embedding"]
    assert list(sdk.embeddings(MODEL, texts[0]).embedding) == older
    assert sdk.embed(MODEL, []).embeddings == []


def test_the_catalogue(sdk: ollama.Client, server: Server) -> None:
    [listed], [loaded] = sdk.list().models, sdk.ps().models
    assert listed.model == loaded.name == f"{MODEL}:latest"
    assert listed.size == loaded.size is not None
    assert listed.digest is not None
    assert len(listed.digest) == 64
    shown = sdk.show(f"{MODEL}:latest")
    assert shown.details == listed.details
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == loaded.context_length
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    version = server.client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_latest_is_the_model_here_and_under_v1(sdk: ollama.Client, server: Server) -> None:
    name = f"{MODEL}:latest"
    assert sdk.chat(name, MESSAGES, options=GREEDY).model == name
    assert server.client.get(f"/v1/models/{name}").json()["id"] == MODEL
    assert server.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.post("/v1/completions", {"model": f"{MODEL}:other", "prompt": "a"}).status_code == 404


def test_a_request_without_a_prompt_loads(sdk: ollama.Client) -> None:
    assert sdk.chat(MODEL, []).done_reason == "load"
    assert sdk.generate(MODEL).done_reason == "load"
    assert [part.done_reason for part in sdk.generate(MODEL, stream=True)] == ["load"]


def test_errors_are_words_under_their_status(sdk: ollama.Client) -> None:
    for stream in (False, True):
        unknown = refusal(lambda stream=stream: list(sdk.chat("nothing", MESSAGES, stream=stream)))
        assert unknown.status_code == 404
        assert "`nothing` does not exist" in unknown.error
    wrong: dict[Callable[[], object], str] = {
        lambda: sdk.chat(MODEL, MESSAGES, think=True): "does not support thinking",
        lambda: sdk.chat(MODEL, MESSAGES, options={"num_ctx": 10**6}): "options.num_ctx must be at most",
        lambda: sdk.chat(MODEL, MESSAGES, options={"top_p": 7}): "options.top_p must be in",
        lambda: sdk.generate(MODEL, "a", suffix="b"): "suffix is not supported",
    }
    for call, words in wrong.items():
        error = refusal(call)
        assert error.status_code == 400
        assert words in error.error
    changes = (lambda: sdk.delete(MODEL), lambda: sdk.copy(MODEL, "b"), lambda: sdk.create("b", from_=MODEL))
    for change in changes:
        assert "change the files" in refusal(change).error


def test_what_has_no_effect_is_named(server: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "options": {**GREEDY, "num_gpu": 1}, "keep_alive": "5m"}
    warning = server.post("/api/chat", body).headers["x-headrace-warning"]
    assert "options.num_gpu" in warning
    assert "keep_alive" in warning
    assert "x-headrace-warning" not in server.post("/api/chat", {**body, "options": GREEDY, "keep_alive": -1}).headers


def test_programs_may_leave_out_the_content_type_and_pages_may_not(server: Server) -> None:
    body = f'{{"model": "{MODEL}"}}'.encode()
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        headers = {"content-type": kind} if kind else {}
        with httpx.Client(base_url=server.base_url, trust_env=False) as client:
            assert client.post("/api/generate", content=body, headers=headers).status_code == 200
            own = client.post("/api/generate", content=body, headers={**headers, "origin": server.base_url})
            foreign = client.post("/api/generate", content=body, headers={**headers, "origin": "http://evil.example"})
            fetched = client.post("/api/generate", content=body, headers={**headers, "sec-fetch-site": "same-origin"})
        assert (own.status_code, foreign.status_code, fetched.status_code) == (415, 403, 415)
        assert foreign.json().keys() == {"error"}


def test_the_root_and_probes_answer_programs_as_ollama_does(server: Server) -> None:
    assert server.client.get("/").text == "Ollama is running"
    for path in ("/", "/api/tags", "/api/version"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    page = server.client.get("/", headers={"accept": "text/html"})
    assert (page.status_code, page.headers["location"]) == (303, "dashboard")
    nothing = server.client.get("/api/nothing")
    assert (nothing.status_code, list(nothing.json())) == (404, ["error"])


def test_pull_knows_the_served_model_and_no_paths(sdk: ollama.Client) -> None:
    assert sdk.pull(MODEL).status == "success"
    assert [part.status for part in sdk.pull(f"{MODEL}:latest", stream=True)] == ["pulling manifest", "success"]
    for name in ("llama3.2", "/etc", "../secrets"):
        assert "is no repository of the hub" in refusal(lambda name=name: sdk.pull(name)).error
        assert "is no repository of the hub" in refusal(lambda name=name: list(sdk.pull(name, stream=True))).error


@pytest.mark.slow
def test_two_names_that_are_one_to_ollama_are_listed_once() -> None:
    with tiny_server(served_model_name="small,small:latest,other") as server:
        shown = server.wait_ready().client.get("/api/tags").json()["models"]
        assert [each["name"] for each in shown] == ["small:latest", "other:latest"]
