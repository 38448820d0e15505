"""The endpoints beside generation: tokens, embeddings, version, load, and what an administrator may do."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from gpu.checkpoint import open_model
from gpu.cpu.library import load_library
from protocol.answers import EngineState
from tests.support.harness import MODEL, TIMEOUT, Metrics, Server
from tests.support.tiny_model import NAME, tiny_server, write_tiny_model

EMBEDDINGS = "/v1/embeddings"
SENTENCES = ["The cat sat on the mat.", "A kitten rests on a rug.", "Interest rates rose in March. 水"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model(MODEL).tokenizer


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def refusal(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# --- tokens


@pytest.mark.slow
def test_text_becomes_tokens_and_text_again(server: Server, tokenizer: Tokenizer) -> None:
    for text in [*SENTENCES, "<|im_start|>user", "👩‍👩‍👧‍👦 " * 500]:
        ids = tokenizer.encode(text).ids
        for prefix in ("", "/v1"):
            answer = server.post(f"{prefix}/tokenize", {"model": MODEL, "prompt": text}).json()
            assert answer == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
            assert server.post(f"{prefix}/detokenize", {"tokens": ids}).json() == {"prompt": text}
    strings = server.post("/tokenize", {"prompt": "The cat", "return_token_strs": True}).json()["token_strs"]
    assert strings == ["The", "Ġcat"]


def test_a_conversation_becomes_the_tokens_that_chat_computes(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = server.post("/tokenize", {"messages": messages}).json()
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert body["tokens"] == chat.json()["prompt_token_ids"]
    without = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert body["tokens"][: without["count"]] == without["tokens"]


def test_tokens_that_do_not_exist_are_refused(server: Server) -> None:
    for tokens in ([-1], [49152], [2**40]):
        assert refusal(server, "/detokenize", {"tokens": tokens})["param"].startswith("tokens")
    assert refusal(server, "/detokenize", {})["param"] == "tokens"
    assert refusal(server, "/tokenize", {})["param"] == "prompt"
    assert refusal(server, "/tokenize", {"messages": []})["param"] == "messages"
    assert server.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


# --- embeddings


def test_the_sdk_reads_embeddings(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """It asks for base64 by itself. That the numbers are the model's is for tests/golden to say."""
    count = sum(len(tokenizer.encode(text).ids) for text in SENTENCES)
    pooled = {}
    for pooling in ("mean", "last"):
        answer = sdk.embeddings.create(model=MODEL, input=SENTENCES, extra_body={"pooling": pooling})
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
        pooled[pooling] = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(np.linalg.norm(pooled[pooling], axis=1), 1, atol=1e-5)
    assert np.abs(pooled["mean"] - pooled["last"]).max() > 0.01
    alike = pooled["mean"] @ pooled["mean"].T
    assert alike[0, 1] > alike[0, 2]
    by_default = np.array([item.embedding for item in sdk.embeddings.create(model=MODEL, input=SENTENCES).data])
    np.testing.assert_allclose(by_default, pooled["mean"], atol=1e-5)


def test_every_shape_of_input_gives_the_same_vector(server: Server, tokenizer: Tokenizer) -> None:
    def vectors(**fields: Any) -> list[Any]:
        answer = server.post(EMBEDDINGS, fields)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    text, ids = SENTENCES[0], tokenizer.encode(SENTENCES[0]).ids
    (plain,) = vectors(input=text)
    for same in ([text], ids, [ids]):
        np.testing.assert_allclose(vectors(input=same), [plain], atol=1e-5)
    (encoded,) = vectors(input=text, encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), plain, atol=1e-5)
    (short,) = vectors(input=text, dimensions=16)
    np.testing.assert_allclose(short, np.array(plain[:16]) / np.linalg.norm(plain[:16]), atol=1e-5)
    (raw,) = vectors(input=text, normalize=False)
    np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), plain, atol=1e-5)
    (cut,) = vectors(input=ids, truncate_prompt_tokens=2)
    np.testing.assert_allclose([cut], vectors(input=ids[-2:]), atol=1e-5)


def test_a_conversation_has_the_vector_of_its_text(server: Server) -> None:
    """Ask as vLLM's clients do: the text that the chat template renders is one input."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SENTENCES[0]}]

    def answered(**fields: Any) -> tuple[Any, int]:
        body = server.post(EMBEDDINGS, fields).raise_for_status().json()
        (item,) = body["data"]
        return item["embedding"], body["usage"]["prompt_tokens"]

    for template in ({}, {"add_generation_prompt": True}):
        asked = {"messages": turns, "add_generation_prompt": False, **template}
        token_ids = server.post("/tokenize", asked).json()["tokens"]
        vector, num_tokens = answered(messages=turns, **template)
        assert num_tokens == len(token_ids)
        np.testing.assert_allclose(vector, answered(input=token_ids)[0], atol=1e-5)
    assert refusal(server, EMBEDDINGS, {})["param"] == "input"
    assert refusal(server, EMBEDDINGS, {"messages": turns, "input": "a"})["param"] == "messages"
    assert refusal(server, EMBEDDINGS, {"messages": turns, "prompt_name": "query"})["param"] == "prompt_name"
    assert (
        refusal(server, EMBEDDINGS, {"messages": [{"role": "user", "content": "word " * 5000}]})["param"] == "messages"
    )


def test_embeddings_that_cannot_be_are_refused(server: Server) -> None:
    for field, value in [
        ("input", ""),
        ("input", []),
        ("input", [49152]),
        ("input", {"a": 1}),
        ("dimensions", 0),
        ("dimensions", 577),
        ("encoding_format", "int4"),
        ("pooling", "max"),
        ("prompt_name", "query"),
        ("truncate_prompt_tokens", 0),
    ]:
        assert refusal(server, EMBEDDINGS, {"input": "a", field: value})["param"].startswith(field)
    long = refusal(server, EMBEDDINGS, {"input": [1] * 4097})
    assert (long["param"], long["code"]) == ("input", "context_length_exceeded")
    assert server.post(EMBEDDINGS, {"input": "a", "model": "other"}).status_code == 404


def test_embeddings_are_made_as_the_models_files_say(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "embedder")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{kind}"} for kind in ("Pooling", "Normalize")]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "Pooling").mkdir()
    (model / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"prompts": {"query": "Find: ", "title": "Title: "}, "default_prompt_name": "title"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with tiny_server(model=model) as server:
        server.wait_ready()

        def vector(text: Any, **fields: Any) -> list[float]:
            answer = server.post(EMBEDDINGS, {"input": text, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()["data"][0]["embedding"]

        ids = server.post("/tokenize", {"prompt": "Find: mills"}).json()["tokens"]
        np.testing.assert_allclose(vector("mills", prompt_name="query"), vector(ids, pooling="last"), atol=1e-6)
        assert np.abs(np.subtract(vector(ids), vector(ids, pooling="mean"))).max() > 0.01
        np.testing.assert_allclose(vector("mills"), vector("mills", prompt_name="title"), atol=1e-6)
        error = refusal(server, EMBEDDINGS, {"input": "a", "prompt_name": "quest"})
        assert error["param"] == "prompt_name"
        assert "query, title" in error["message"]
        assert refusal(server, EMBEDDINGS, {"input": ids, "prompt_name": "query"})["param"] == "prompt_name"


# --- small ones


def test_ping_version_and_load_answer(server: Server) -> None:
    for method in ("GET", "POST"):
        answer = server.client.request(method, "/ping")
        assert (answer.status_code, answer.content) == (200, b"")
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/load").json() == {"server_load": 0}


# --- administration


@pytest.fixture(scope="module")
def governed() -> Iterator[Server]:
    with tiny_server(api_keys="client", admin_keys="admin", engine="process") as running:
        yield running.wait_ready()


def ask(server: Server, method: str, path: str, body: object = None, key: str = "admin") -> Any:
    return server.client.request(method, path, json=body, headers={"x-api-key": key})


@pytest.mark.slow
def test_only_administrators_govern_and_govern_only(governed: Server) -> None:
    for method, path in (
        *(("GET", "/server_info"), ("GET", "/engine_state")),
        *(("POST", "/reset_prefix_cache"), ("POST", "/abort_requests")),
        *(("POST", "/start_profile"), ("POST", "/stop_profile"), ("POST", "/configure_logging")),
    ):
        assert ask(governed, method, path, key="client").status_code == 401
        assert governed.client.request(method, path).status_code == 401
    assert ask(governed, "GET", "/v1/models").status_code == 401
    assert ask(governed, "GET", "/v1/models", key="client").status_code == 200
    assert governed.client.get("/ping").status_code == 200


def test_where_nobody_governs_there_is_nothing(server: Server) -> None:
    assert server.client.get("/server_info").status_code == 404
    assert server.client.get("/engine_state").status_code == 404
    assert server.post("/reset_prefix_cache", {}).status_code == 404
    assert server.post("/abort_requests", {"request_ids": ["a"]}).status_code == 404
    assert server.post("/configure_logging", {"log_level": "error"}).status_code == 404


def test_without_the_setting_there_is_no_tokenizer_info(server: Server) -> None:
    assert server.client.get("/tokenizer_info").status_code == 404


def test_server_info_has_no_paths_and_no_secrets(governed: Server) -> None:
    answer = ask(governed, "GET", "/server_info")
    info = answer.json()
    assert info["models"] == [NAME]
    assert (info["max_model_len"], info["vocab_size"], info["embedding_size"]) == (8192, 49152, 32)
    assert info["settings"]["max_num_seqs"] == 16
    assert info["computes"].startswith("cpu, ")
    assert info["is_batch_invariant"] == (load_library() is not None), "who computes comes from the engine's process"
    for secret in ("client", "admin", "/tmp", "headrace-tiny"):
        assert secret not in answer.text


def test_an_engine_in_a_process_tells_of_prompts_too(governed: Server) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    choice = ask(governed, "POST", "/v1/completions", body, key="client").json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_logprobs"]) == 3
    answer = ask(governed, "POST", EMBEDDINGS, {"input": [[5, 6, 7], [8]]}, key="client").json()
    assert [len(item["embedding"]) for item in answer["data"]] == [32, 32]


def test_administration_is_described_where_there_is_one(governed: Server, server: Server) -> None:
    described = ask(governed, "GET", "/openapi.json", key="client").json()["paths"]
    assert {"/server_info", "/engine_state", "/reset_prefix_cache", "/abort_requests"} <= described.keys()
    assert {"/start_profile", "/stop_profile"} <= described.keys()
    assert "/server_info" not in server.client.get("/openapi.json").json()["paths"]


def test_the_log_level_changes_while_the_server_runs(governed: Server) -> None:
    """In the engine's process as well, which logs grammars that it finds too complex."""

    def complete(name: str) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 1000, "guided_regex": "^[a-z]{400}(.{1,500}a){2,500}$"}
        governed.post("/v1/completions", body, **{"x-api-key": "client", "x-request-id": name})

    assert ask(governed, "POST", "/configure_logging", {"log_level": "error"}).json() == {"log_level": "error"}
    complete("while-errors-are")
    refused = ask(governed, "POST", "/configure_logging", {"log_level": "loud"})
    assert refused.status_code == 400
    assert "log_level" in refused.text
    assert ask(governed, "POST", "/configure_logging", {"log_level": "info"}).status_code == 200
    complete("while-all-are")
    said = {'"event": "request"', '"event": "request cmpl-while-all-are'}  # by the server and by the engine
    governed.poll(lambda: governed.log, lambda log: log.count("while-all-are") >= 2)  # a moment after the answer
    lines = [line for line in governed.log.splitlines() if "while-all-are" in line]
    assert all(any(words in line for line in lines) for words in said), lines
    assert "while-errors-are" not in governed.log
    for level in ("error", "info"):
        assert f"The log level is {level} from now on" in governed.log


def test_the_prefix_cache_is_forgotten(governed: Server) -> None:
    def cached() -> int:
        body = {"prompt": list(range(100, 164)), "max_tokens": 1}
        usage = ask(governed, "POST", "/v1/completions", body, key="client").json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 48)
    assert ask(governed, "POST", "/reset_prefix_cache").json() == {"success": True}
    assert (cached(), cached()) == (0, 48)
    assert ask(governed, "POST", "/reset_prefix_cache?reset_external=false").json() == {"success": True}
    refused = ask(governed, "POST", "/reset_prefix_cache?reset_external=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_external")


def test_a_profile_tells_what_steps_do_with_their_time(governed: Server) -> None:
    def complete(num_tokens: int) -> None:
        body = {"prompt": list(range(200, 264)), "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.5}
        assert ask(governed, "POST", "/v1/completions", body, key="client").status_code == 200

    def spans(name: str) -> list[dict[str, Any]]:
        return [event for event in trace["traceEvents"] if event["name"] == name]

    assert ask(governed, "POST", "/stop_profile").status_code == 409
    for wrong in ("0", "1001", "ten", "9" * 99):
        refused = ask(governed, "POST", f"/start_profile?num_steps={wrong}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "num_steps")
    # Benchmarks send the body of their first request.
    assert ask(governed, "POST", "/start_profile", {"prompt": "x"}).json() == {"success": True}
    assert ask(governed, "POST", "/start_profile?num_steps=12").json() == {"success": True}
    complete(20)
    trace = ask(governed, "POST", "/stop_profile").json()
    executed = spans("execute")
    assert len(executed) == len(spans("schedule")) == 12
    assert executed[0]["args"] | {"step": 0} == {
        "step": 0, "requests": 1, "prefill_tokens": 64, "decode_tokens": 0, "outcome": "done"
    }  # fmt: skip
    assert [event["args"]["decode_tokens"] for event in executed[1:]] == [1] * 11
    # One part begins when the other ends, so that nothing of the time is untold.
    parts = sorted(executed + spans("schedule") + spans("update"), key=lambda event: event["ts"])
    assert len(parts) == 12 + 12 + 11
    for part, following in pairwise(parts):
        assert part["ts"] + part["dur"] == pytest.approx(following["ts"], abs=0.01)
    for name in ("forward", "draw"):  # what the model does lies within the steps
        assert len(spans(name)) == 12
        for step, call in zip(executed, spans(name), strict=True):
            assert step["ts"] <= call["ts"] <= call["ts"] + call["dur"] <= step["ts"] + step["dur"]
    assert ask(governed, "POST", "/stop_profile").status_code == 409, "it was told once"
    complete(2)


def test_the_engine_tells_what_it_does_between_two_steps(governed: Server) -> None:
    def state() -> dict[str, Any]:
        answer = ask(governed, "GET", "/engine_state")
        assert answer.status_code == 200
        msgspec.json.decode(answer.content, type=EngineState)
        (engine,) = answer.json()["engines"].values()
        return engine

    body = {"prompt": list(range(100, 120)), "max_tokens": 8000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "watched", "x-api-key": "client"}
    with governed.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()  # which closes the stream when nobody holds it
        assert next(lines)
        before = state()
        (running,) = before["running"]
        assert (running["num_prompt_tokens"], running["status"]) == (20, "running")
        assert before["blocks"]["num_owned"] == running["num_blocks"] > 0
        now = governed.poll(state, lambda now: now["num_steps"] > before["num_steps"])
        assert now["running"][0]["num_output_tokens"] > running["num_output_tokens"]
        assert now["steps"][-1]["num_decode_tokens"] == 1
    after = governed.poll(state, lambda now: not now["running"])
    assert after["blocks"]["num_owned"] == 0


def test_a_request_is_ended_by_its_id(governed: Server) -> None:
    """Its client gets what there is; nobody else notices."""
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
    begun = threading.Event()

    def num_aborted() -> int:
        return Metrics.parse(ask(governed, "GET", "/metrics", key="client").text).aborted

    num_before = num_aborted()

    def generate() -> tuple[str, str | None]:
        text, reason = "", None
        with openai.OpenAI(base_url=f"{governed.base_url}/v1", api_key="client", timeout=TIMEOUT) as client:
            stream = client.completions.create(
                model=NAME,
                stream=True,
                extra_headers={"x-request-id": "endless"},
                extra_body={"ignore_eos": True},
                prompt="a",
                max_tokens=8000,
            )
            for chunk in stream:
                begun.set()
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason
        return text, reason

    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(generate)
        assert begun.wait(TIMEOUT)
        headers = {"x-request-id": "other"}
        other = pool.submit(
            governed.post, "/v1/completions", body | {"max_tokens": 50}, **headers, authorization="Bearer client"
        )
        assert ask(governed, "POST", "/abort_requests", {"request_ids": ["cmpl-endless", "unknown"]}).json() == {
            "aborted": 1
        }
        text, reason = streamed.result()
        assert (bool(text), reason) == (True, "abort")
        assert other.result().json()["usage"]["completion_tokens"] == 50
    assert ask(governed, "POST", "/abort_requests", {"request_ids": ["endless"]}).json() == {"aborted": 0}
    assert ask(governed, "POST", "/abort_requests", {"request_ids": []}).status_code == 400
    assert num_aborted() == num_before + 1


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", "Did you mean /v1/chat/completions?"),
        ("GET", "/v1/chat/completions", "GET is not allowed at '/v1/chat/completions'; send POST."),
        ("GET", "/server_info", "start the server with the setting admin_keys"),
        ("POST", "/v1/images/generations", "Models are served for text"),
        ("GET", "/zzz", "/docs lists the routes."),
    ],
)
def test_a_wrong_path_is_answered_with_the_right_one(server: Server, method: str, path: str, said: str) -> None:
    answer = server.client.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code in (404, 405)
    assert said in answer.json()["error"]["message"]
