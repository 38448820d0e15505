"""Several models in one server: chosen by name, loaded when asked for, unloaded for each other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.serving.loading import TOKENIZER_MEMORY
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from gpu.host import process_memory
from tests.support.harness import MODEL, Server
from tests.support.serve_command import ServeCommand
from tests.support.tiny_model import CONFIG, write_tiny_model

MIB = 2**20
ADMIN = {"authorization": "Bearer admin-key"}
EVERY_DIALECT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses/input_tokens": {"input": "Hello"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models that differ in nothing but their names and the lengths of their contexts."""
    folder = tmp_path_factory.mktemp("models")
    for name, context in (("one", 1024), ("two", 2048), ("three", 512)):
        write_tiny_model(folder / name, max_position_embeddings=context, vocab_size=512)
    return folder


def several(folder: Path, **options: Any) -> Server:
    usual = {"models_dir": folder, "load_format": "dummy", "max_model_len": "", "model": "", "admin_keys": "admin-key"}
    return ServeCommand(**{**usual, "kv_cache_memory": "64MiB", "dtype": "float32", **options})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with several(folder) as running:
        yield running.wait_ready()


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["status"] for card in server.client.get("/v1/models").json()["data"]}


def engines(server: Server) -> list[int]:
    """The engines' processes, with the spare one, which has no model and is forked for each."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
            if group == server.pid and b"engine_main" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.slow
def test_nothing_is_loaded_before_it_is_asked_for_and_the_server_is_healthy(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()
        assert states(server) == {"one": "unloaded", "three": "unloaded", "two": "unloaded"}
        assert server.client.get("/health").status_code == 200
        assert len(engines(server)) == 1, "the spare one"


def test_the_model_of_a_request_is_chosen_by_name_in_every_dialect(server: Server) -> None:
    for path, body in EVERY_DIALECT.items():
        for name in ("one", "two"):
            answer = server.post(path, body | {"model": name})
            assert answer.status_code == 200, answer.text
            if "model" in answer.json():
                assert answer.json()["model"] == name
            if "max_model_len" in answer.json():
                assert answer.json()["max_model_len"] == {"one": 1024, "two": 2048}[name]
        missing = server.post(path, body | {"model": "four"})
        assert missing.status_code == 404
        assert "one, three, two" in missing.text
    found = states(server)
    assert found["one"] == found["two"] == "loaded"


def test_without_a_name_the_first_model_answers(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}).json()["model"] == "one"


def test_a_body_that_is_no_object_is_refused_before_anything_is_loaded(server: Server) -> None:
    for body in (b"[", b"[]", b'{"model": 3}', b'{"timeout": ' + b"9" * 400 + b"}"):
        assert server.client.post("/v1/completions", content=body).status_code == 400
    assert states(server)["three"] == "unloaded"


def test_a_client_keeps_a_model_for_longer_than_there_are_dates(server: Server) -> None:
    for seconds in (1e15, "999999999999h", -1):
        asked = server.post("/api/generate", {"model": "one", "keep_alive": seconds, "stream": False})
        assert asked.status_code == 200, asked.text
        loaded = {each["name"]: each["expires_at"] for each in server.client.get("/api/ps").json()["models"]}
        assert loaded["one:latest"] == "9999-12-31T23:59:59Z"


def test_figures_have_the_names_of_the_models(server: Server) -> None:
    for name in ("one", "two"):
        server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "model": name})
    page = server.client.get("/metrics").text
    for name in ("one", "two"):
        assert f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}}' in page
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert page.count("\nprocess_resident_memory_bytes ") == 1


def resident_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    return resident


def test_the_memory_of_a_loaded_model_is_that_of_its_engine_with_the_whole_kv_cache(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "model": "one"})

    def measured() -> int:
        """The figure of its engine without its KV cache; an estimate until it was measured, soon after the load."""
        (card,) = (each for each in server.client.get("/v1/models").json()["data"] if each["id"] == "one")
        return int(card["memory"]) - 64 * MIB - TOKENIZER_MEMORY

    # Engines that have mapped the same file since then share its pages: each one's part is smaller now.
    bounds = [(process_memory(pid) or 0, resident_memory(pid)) for pid in engines(server)]
    server.poll(measured, lambda engine: any(own - 16 * MIB < engine < most + 16 * MIB for own, most in bounds))


def test_a_response_is_continued_by_another_model(server: Server) -> None:
    first = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2, "model": "one"}).json()
    more = {"input": "And?", "max_output_tokens": 2, "model": "two", "previous_response_id": first["id"]}
    assert server.post("/v1/responses", more).json()["model"] == "two"
    again = {"input": "Hello", "max_output_tokens": 2, "model": "one", "background": True}
    begun = server.post("/v1/responses", again).json()
    ended = server.poll(
        lambda: server.client.get(f"/v1/responses/{begun['id']}").json(),
        lambda response: response["status"] not in ("queued", "in_progress"),
    )
    assert ended["model"] == "one"


@pytest.mark.slow
def test_the_folder_is_read_again(folder: Path) -> None:
    with several(folder, worker_class="asyncio") as server:
        server.wait_ready()
        write_tiny_model(folder / "zero", max_position_embeddings=512, vocab_size=512)
        try:
            server.send_signal(signal.SIGHUP)
            server.poll(lambda: states(server), lambda found: "zero" in found)
        finally:
            for file in (folder / "zero").iterdir():
                file.unlink()
            (folder / "zero").rmdir()
        server.send_signal(signal.SIGHUP)
        server.poll(lambda: states(server), lambda found: "zero" not in found)


@pytest.mark.slow
def test_the_least_recently_used_model_makes_room(folder: Path) -> None:
    with several(folder, memory="750MiB") as server:
        server.wait_ready()
        for name in ("one", "two", "three"):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": name}).status_code == 200
        assert states(server) == {"one": "unloaded", "three": "loaded", "two": "loaded"}
        memory = server.client.get("/startupz").json()["memory"]
        assert memory["used"] <= memory["limit"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(folder: Path) -> None:
    with several(folder, memory="100MiB") as server:
        answer = server.wait_ready().post("/v1/completions", {"prompt": "a", "model": "one"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_too_large"
        assert "100.0MiB" in answer.text


@pytest.mark.slow
def test_an_engine_that_dies_takes_only_the_requests_of_its_model(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()
        short = {"prompt": "a", "max_tokens": 1}
        (spare,) = engines(server)
        server.post("/v1/completions", short | {"model": "one"})
        (victim,) = set(engines(server)) - {spare}
        server.post("/v1/completions", short | {"model": "two"})
        long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            server.client.stream("POST", "/v1/completions", content=json.dumps(long | {"model": "two"})) as stays,
            server.client.stream("POST", "/v1/completions", content=json.dumps(long | {"model": "one"})) as dies,
        ):
            broken, whole = dies.iter_lines(), stays.iter_lines()
            next(broken)
            next(whole)
            os.kill(victim, signal.SIGKILL)
            assert any('"error"' in line for line in broken)
            rest = list(whole)
        assert not any('"error"' in line for line in rest)
        assert "data: [DONE]" in rest
        assert server.client.get("/livez").status_code == 200
        assert server.post("/v1/completions", short | {"model": "one"}).status_code == 200


@pytest.mark.slow
def test_a_model_is_loaded_without_the_spare_process_and_there_is_another_one_soon(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()
        (spare,) = engines(server)
        os.kill(spare, signal.SIGKILL)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "one"}).status_code == 200
        server.poll(lambda: set(engines(server)), lambda found: len(found - {spare}) == 2)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "two"}).status_code == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "one"}).status_code == 200


@pytest.mark.slow
def test_an_administrator_loads_and_unloads_and_lets_models_sleep(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()

        def act(path: str, **body: str) -> Any:
            return server.client.post(path, json=body or None, headers=ADMIN)

        assert act("/models/load", model="two").json() == {"models": {"two": "loaded"}}
        assert act("/models/load", model="four").status_code == 404
        long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True, "model": "two"}
        with server.client.stream("POST", "/v1/completions", content=json.dumps(long)) as busy:
            lines = busy.iter_lines()  # kept: without it, httpx would close the stream
            next(lines)
            assert act("/models/unload", model="two").status_code == 409
        server.poll(lambda: act("/models/unload", model="two"), lambda answer: answer.status_code == 200)
        assert len(engines(server)) <= 1, "the spare one"
        assert act("/models/load", model="one").status_code == 200
        assert act("/sleep").json()["models"]["one"] == "unloaded"
        assert act("/wake_up").json()["models"] == {"one": "loaded", "three": "unloaded", "two": "unloaded"}
        figures = server.client.get("/metrics", headers=ADMIN).text
        assert 'headrace:model_loads_total{model_name="one"} 2.0' in figures
        assert 'headrace:model_loaded{model_name="two"} 0.0' in figures
        assert act("/models/load", model="two").status_code == 200
        assert act("/sleep?model=two").json()["models"] == {"one": "loaded", "three": "unloaded", "two": "unloaded"}
        assert act("/sleep?model=four").status_code == act("/wake_up?model=four").status_code == 404
        assert act("/wake_up?model=three").json()["models"] == {"one": "loaded", "three": "loaded", "two": "unloaded"}
        assert act("/wake_up").json()["models"]["two"] == "loaded"


@pytest.mark.slow
def test_a_stream_that_began_before_its_model_was_loaded_says_what_has_no_effect(folder: Path) -> None:
    with several(folder, sse_keep_alive=0.01) as server:
        body = {"prompt": "a", "max_tokens": 1, "stream": True, "model": "one", "boost": 1}
        answer = server.wait_ready().post("/v1/completions", body)
        assert "x-headrace-warning" not in answer.headers
        lines = answer.text.split("\n\n")
        assert (lines[0], lines[-2]) == (": keep-alive", "data: [DONE]")
        assert any(line.startswith(": x-headrace-warning: fields without effect: boost") for line in lines)


@pytest.mark.slow
def test_refusals_by_limits_of_the_whole_server_are_figures_of_the_model(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.few]\nkeys = ["few"]\nrequests_per_minute = 1\n')
    with several(folder, api_keys_file=keys) as server:
        server.wait_ready()
        server.client.headers["authorization"] = "Bearer few"
        body = {"prompt": "a", "max_tokens": 1, "model": "one"}
        assert [server.post("/v1/completions", body).status_code for _ in range(2)] == [200, 429]
        page = server.client.get("/metrics", headers=ADMIN).text
        assert 'admission_rejections_total{engine="0",model_name="one",reason="requests_per_minute"} 1.0' in page


@pytest.mark.slow
def test_a_key_is_limited_to_models(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.limited]\nkeys = ["limited"]\nmodels = ["two"]\n[tenants.free]\nkeys = ["free"]\n')
    with several(folder, api_keys_file=keys) as server:
        server.wait_ready()
        server.client.headers["authorization"] = "Bearer free"
        assert list(states(server)) == ["one", "three", "two"]
        server.client.headers["authorization"] = "Bearer limited"
        assert list(states(server)) == ["two"]
        assert [each["name"] for each in server.client.get("/api/tags").json()["models"]] == ["two:latest"]
        assert server.client.get("/v1/models/one").status_code == 404
        assert server.post("/api/show", {"model": "one"}).status_code == 404
        for path, body in EVERY_DIALECT.items():
            refused = server.post(path, body | {"model": "one"})
            assert refused.status_code == 404
            assert "one, " not in refused.text
            assert ", three" not in refused.text
            assert server.post(path, body).status_code == 200, "the first that it may use"
        ollama = {"model": "one", "prompt": "a", "stream": False, "options": {"num_predict": 1}}
        assert server.post("/api/generate", ollama).status_code == 404
        assert server.post("/api/generate", ollama | {"model": "two"}).status_code == 200
        assert states(server) == {"two": "loaded"}


@pytest.mark.slow
def test_models_that_come_and_go_leave_no_mapped_file(folder: Path) -> None:
    with several(folder) as server:
        server.wait_ready()
        for _ in range(4):
            assert server.client.post("/models/load", json={"model": "one"}, headers=ADMIN).status_code == 200
            assert server.client.post("/models/unload", json={"model": "one"}, headers=ADMIN).status_code == 200
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert maps.count("/heartbeat") <= 1, "that of the latest engine"


@pytest.mark.slow
def test_one_model_stays_loaded() -> None:
    with ServeCommand(admin_keys="admin-key") as server:
        server.wait_ready()
        name = states(server).popitem()[0]
        assert server.client.post("/models/unload", json={"model": name}, headers=ADMIN).status_code == 409


def write_random_checkpoint(directory: Path, seed: int) -> Path:
    """A model with weights of its own, whose vocabulary is the embedded model's."""
    write_tiny_model(directory)
    draw = np.random.default_rng(seed)
    shapes = tensor_shapes(config_from_hf(CONFIG, source="random"))
    weights = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    return directory


def greedy(server: Server, name: str, prompt: object, count: int = 24) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_models_of_other_contents_give_their_own_answers_at_the_same_time(tmp_path: Path) -> None:
    paths = {name: str(write_random_checkpoint(tmp_path / name, seed)) for seed, name in enumerate(("red", "blue"))}
    paths["real"] = MODEL
    tables = json.dumps({name: {"model": path} for name, path in paths.items()})
    prompts = [f"Question {n}: where is the sea?" for n in range(4)]
    work = [(name, prompt) for prompt in prompts for name in paths]
    alone: dict[tuple[str, str], str] = {}
    for name, path in paths.items():
        with ServeCommand(model=path, load_format="auto", kv_cache_memory="64MiB", max_model_len="") as server:
            server.wait_ready()
            names = server.client.get("/v1/models").json()["data"]
            alone |= {(name, prompt): greedy(server, names[0]["id"], prompt)[0] for prompt in prompts}
    assert len(set(alone.values())) > 3 * len(prompts) // 2, "three models say different things"
    options = {"models": tables, "model": "", "models_dir": "", "load_format": "auto"}
    with several(tmp_path, **options, dtype="auto") as server, ThreadPoolExecutor(len(work)) as pool:
        server.wait_ready()
        texts = pool.map(lambda each: greedy(server, *each)[0], work)
        assert dict(zip(work, texts, strict=True)) == alone
        assert set(states(server).values()) == {"loaded"}


@pytest.mark.slow
def test_blocks_on_disk_survive_an_unload(tmp_path: Path) -> None:
    options = {"models": json.dumps({"real": {"model": MODEL}, "other": {"model": MODEL, "dtype": "float32"}})}
    options |= {"model": "", "models_dir": "", "load_format": "auto", "kv_cache_dir": str(tmp_path / "kv")}
    prompt = [n * 997 % 40000 + 100 for n in range(600)]
    with several(tmp_path, **options, dtype="auto", max_num_batched_tokens=512) as server:
        server.wait_ready()
        text, cached = greedy(server, "real", prompt)
        assert cached == 0
        server.poll(lambda: len(list((tmp_path / "kv").glob("*/*.kv"))), lambda count: count >= 600 // 32, 0.05)
        for act, state in (("unload", "unloaded"), ("load", "loaded")):
            answer = server.client.post(f"/models/{act}", json={"model": "real"}, headers=ADMIN)
            assert answer.status_code == 200, answer.text
            assert states(server)["real"] == state
        again, cached = greedy(server, "real", prompt)
        assert again == text
        assert cached >= 512
        assert greedy(server, "other", prompt)[1] == 0, "another model's blocks"
