"""From settings to engines: which kind, how many, and what each gets of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Tokenizer

from app.config.settings import Settings, SettingsError
from app.library import LLM
from app.serving import loading
from app.serving.loading import divide, end_token_ids, make_client, open_files
from engine.errors import ConfigError
from engine.messages import FinishReason, SamplingParams
from engine.transport.client import ThreadClient
from engine.transport.data_parallel import DataParallelClient
from engine.transport.process_client import ProcessClient
from gpu.checkpoint import ModelFiles, open_model
from gpu.checkpoint.model_files import no_progress
from gpu.runner.runner import WorkerOptions
from tests.engine.helpers import id_of
from tests.support.tiny_model import write_tiny_model

SECRET = "sk-not-for-the-engine"


def client(**settings: Any) -> object:
    return make_client(Settings(**settings), cast(ModelFiles, None), no_progress)


def environment_of(process: object) -> dict[str, str]:
    """What an engine's process will be started with."""
    return dict(cast(ProcessClient, process)._make_process()._environment or {})


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_chat_template_without_end_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "long.jinja").write_bytes(b"a" * (2**20 + 1))
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "long.jinja", tmp_path):
        with pytest.raises(SettingsError, match=f"chat_template: cannot read {path}: it is no regular file, or has"):
            open_files(Settings(chat_template=path), None)


@pytest.mark.usefixtures("no_devices")
def test_the_settings_choose_the_client() -> None:
    assert type(client()) is ThreadClient
    assert type(client(engine="process")) is ProcessClient
    parallel = client(data_parallel_size=3)
    assert type(parallel) is DataParallelClient
    assert len(parallel.replicas) == 3


def test_no_key_reaches_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", SECRET)
    process = cast(ProcessClient, client(engine="process", api_keys=SECRET))
    assert "PATH" in environment_of(process)
    assert SECRET not in json.dumps([process._setup, environment_of(process)])


def test_the_engines_process_gets_the_same_settings() -> None:
    settings = Settings(
        engine="process", kv_cache_memory="64MiB", served_model_name="a,b", cache_dir="~/models", seed=7
    )
    assert Settings(**json.loads(json.dumps(settings.without_secrets()))) == settings


def test_the_executor_gets_what_the_settings_say_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WorkerOptions] = []
    monkeypatch.setattr("gpu.executor.load_executor", lambda files, options: given.append(options))
    monkeypatch.setattr("gpu.model_loader.import_what_computes", lambda config, options: None)
    loading.make_executor(Settings(gpu_memory_utilization=0.4), cast(ModelFiles, SimpleNamespace(config=None)), 0.5)
    assert (given[0].gpu_memory_utilization, given[0].kv_cache_share) == (0.4, 0.5)


@pytest.mark.parametrize("executor", ["mp", "ray"])
@pytest.mark.parametrize(("setting", "allowed"), [("tensor", "2 query heads"), ("pipeline", "1 layers")])
def test_more_ranks_than_a_model_can_be_cut_for_are_refused_before_any_is_started(
    tmp_path: Path, executor: str, setting: str, allowed: str
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    sizes: dict[str, Any] = {"executor": executor, f"{setting}_parallel_size": 64}
    with pytest.raises(ConfigError, match=f"{setting}_parallel_size is 64: .* the model's {allowed}.* works"):
        open_files(Settings(model=model, load_format="dummy", **sizes), None)


def test_the_seed_makes_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    assert open_files(Settings(model=model, load_format="dummy", seed=7), None).seed == 7
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("gpu.parallel.multiproc.MultiprocExecutor", lambda *all, **named: given.append(all[0]))
    settings = Settings(model=model, load_format="dummy", seed=7, executor="mp")
    loading.make_executor(settings, open_files(settings, None), 1.0)
    assert given[0]["seed"] == 7, "ranks open the model themselves"


@pytest.mark.usefixtures("no_devices")
def test_engines_without_devices_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(size: int, **settings: Any) -> list[tuple[int | None, float]]:
        replicas = divide(Settings(engine="process", data_parallel_size=size, **settings))
        assert {replica.devices for replica in replicas} == {None}
        return [(replica.settings.num_threads, replica.kv_cache_share) for replica in replicas]

    monkeypatch.setattr(loading, "usable_cores", lambda: 9)
    assert threads(2) == [(4, 0.5)] * 2
    assert threads(2, num_threads=3) == [(3, 0.5)] * 2
    assert threads(16) == [(1, 1 / 16)] * 16, "each has at least one"


def test_each_engine_gets_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc ,5")
    monkeypatch.setattr(loading, "usable_cores", lambda: 9)
    settings = Settings(engine="process", data_parallel_size=2)
    assert [(replica.devices, replica.kv_cache_share) for replica in divide(settings)] == [("2", 1), ("GPU-abc", 1)]
    assert [replica.settings.num_threads for replica in divide(settings)] == [4, 4], "which compile kernels"
    on_cpu = settings.model_copy(update={"device": "cpu"})
    assert [(replica.devices, replica.kv_cache_share) for replica in divide(on_cpu)] == [(None, 0.5)] * 2
    with pytest.raises(ConfigError, match=r"data_parallel_size is 4: .* and 3 can be used. data_parallel_size=3 works"):
        divide(settings.model_copy(update={"data_parallel_size": 4}))
    process = cast(DataParallelClient, make_client(settings, cast(ModelFiles, None), no_progress)).replicas[1].client
    assert environment_of(process)["CUDA_VISIBLE_DEVICES"] == "GPU-abc"


@pytest.mark.slow
def test_an_answer_ends_with_the_end_tokens_of_its_syntax_though_the_files_name_others(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", vocab_size=512)
    ends = ["<|eot_id|>", "<|eom_id|>", "<|call|>", "<|observation|>", "<|tool_response>", "</s>"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(ends)
    tokenizer.add_tokens(["<|channel|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    write_tiny_model(tmp_path / "config", vocab_size=520)
    (tmp_path / "config" / "config.json").rename(model / "config.json")
    llm = LLM(str(model), load_format="dummy", kv_cache_memory="1MiB", max_model_len=64, device="cpu", progress=False)
    for token in [*ends, "<|channel|>"]:
        forced = SamplingParams(max_tokens=3, logit_bias={id_of(tokenizer, token): 100.0})
        answers = [
            llm.generate([[5, 6]], sampling, progress=False)[0].choices[0]
            for sampling in (forced, msgspec.structs.replace(forced, ignore_eos=True))
        ]
        assert [len(answer.token_ids) for answer in answers] == [1 if token in ends else 3, 3]
        assert answers[0].finish_reason is (FinishReason.STOP if token in ends else FinishReason.LENGTH)


def test_a_token_inside_of_answers_ends_none_though_the_files_name_it(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", vocab_size=512)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>", "<|call|>", "<|return|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    ends, call, answer = (id_of(tokenizer, token) for token in ("<|end|>", "<|call|>", "<|return|>"))
    write_tiny_model(tmp_path / "config", vocab_size=520, eos_token_id=[answer, ends])
    (tmp_path / "config" / "config.json").rename(model / "config.json")
    for template, is_inside in (("{{ messages }}", False), ("<|channel|><|message|>", True)):
        (model / "chat_template.jinja").write_text(template)
        found = end_token_ids(open_model(str(model), load_format="dummy"))
        assert {call, answer} <= set(found)
        assert (ends not in found) is is_inside
