"""A small random Llama through the whole device side: load, plan, run, sample."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, EngineDead, ProfileTooLarge
from engine.executor import Executor
from engine.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from gpu.checkpoint import ModelConfig, ModelFiles, open_model
from gpu.checkpoint.tensors import tensor_shapes
from gpu.executor import UniProcExecutor, load_executor
from gpu.model_loader import resolve_device
from gpu.models.torch_model import resolve_dtype
from gpu.profile import TorchProfile
from gpu.runner.runner import WorkerOptions
from gpu.worker import Worker
from tests.gpu.checkpoint_files import TINY, TinyGGUF
from tests.gpu.checkpoint_files import random_weights as tiny_weights
from tests.gpu.native_builds import needs_library
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request
from tests.support.embedded_model import embedded_gguf

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=307,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
BLOCK_SIZE = 4
OPTIONS = WorkerOptions(dtype="float32", device="cpu", max_model_len=64, max_num_seqs=8, block_size=BLOCK_SIZE)
MAX_BLOCKS = 64 // BLOCK_SIZE


def random_weights():
    """Large enough that attention is far from uniform and a mistake shows."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensor_shapes(CONFIG).items():
        yield name, torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.3


@pytest.fixture
def executor() -> UniProcExecutor:
    return UniProcExecutor(Worker(CONFIG, random_weights(), OPTIONS), CONFIG.vocab_size)


def prompts() -> list[NewRequestData]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0},
    ]
    return [
        new_request(
            f"r{i}",
            [(17 * i + 5 * j) % CONFIG.vocab_size for j in range(1 + 7 * i)],
            block_ids=[8 * b + i for b in range(MAX_BLOCKS)],
            **kind,
        )
        for i, kind in enumerate(kinds)
    ]


def generate(executor: Executor, requests: list[NewRequestData], *, chunk: int, num_tokens: int = 10):
    """Together, prefilling `chunk` tokens of each a step, and each joining a step after the one before it."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    pending: dict[str, int] = {}
    removed: list[str] = []
    waiting = list(requests)
    while waiting or pending:
        new = [waiting.pop(0)] if waiting else []
        pending |= {r.request_id: len(r.token_ids) for r in new}
        going_on = [r for r, n in pending.items() if n > chunk]
        plan = plan_of({r: min(chunk, n) for r, n in pending.items()}, new=new, removed=removed, going_on=going_on)
        output = executor.submit(plan).result()
        removed = []
        for r, count, sampled in zip(
            plan.request_ids, plan.num_scheduled_tokens, output.sampled_token_ids, strict=True
        ):
            pending[r] -= count
            if sampled:
                tokens[r] += sampled
                pending[r] = 1
                if len(tokens[r]) == num_tokens:
                    del pending[r]
                    removed.append(r)
    executor.submit(plan_of({}, removed=removed)).result()
    return tokens


def test_a_mixed_batch_says_what_each_request_says_alone(executor: UniProcExecutor):
    together = generate(executor, prompts(), chunk=6)
    assert len({tuple(t) for t in together.values()}) == len(together)
    for request in prompts():
        for chunk in (6, 1000):
            assert generate(executor, [request], chunk=chunk)[request.request_id] == together[request.request_id]


def test_an_executor_tells_the_engine_what_it_needs_to_know(executor: UniProcExecutor):
    assert executor.block_size == BLOCK_SIZE
    assert executor.num_blocks == 8 * MAX_BLOCKS
    assert executor.vocab_size == CONFIG.vocab_size
    assert executor.max_model_len == 64
    assert "cpu, float32" in executor.summary
    assert "8.0 x the 64-token context" in executor.summary


def test_an_unset_context_is_the_models_own():
    options = WorkerOptions(dtype="float32", device="cpu", max_num_seqs=2)
    assert Worker(CONFIG, random_weights(), options).kv_cache_size.max_model_len == 256


def test_a_step_that_cannot_be_started_raises_at_once_so_that_nothing_is_planned_on_top(executor: UniProcExecutor):
    with pytest.raises(KeyError, match="nobody"):
        executor.submit(plan_of({"nobody": 1}))
    assert generate(executor, prompts()[:1], chunk=1000)["r0"]


def test_shutdown_is_idempotent_and_final(executor: UniProcExecutor):
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDead):
        executor.submit(plan_of({}))


def test_loading_reports_progress_and_sets_the_threads_of_its_own_thread():
    reports = []
    files = ModelFiles(
        name="dummy",
        config=CONFIG,
        chat_template=None,
        special_tokens={},
        load_tokenizer=lambda: pytest.fail("nobody needs it"),
        tensors=None,
        progress=lambda *report: reports.append(report),
    )
    outputs: list[ModelRunnerOutput | int] = []

    def engine_thread() -> None:
        executor = load_executor(files, replace(OPTIONS, num_threads=1))
        outputs.append(torch.get_num_threads())
        request = new_request("a", [1, 2, 3], block_ids=[0], temperature=0.0)
        outputs.append(executor.submit(plan_of({"a": 3}, new=[request])).result())

    thread = threading.Thread(target=engine_thread)
    thread.start()
    thread.join()
    total = len(tensor_shapes(CONFIG))
    assert reports[-1] == ("Loading weights", total, total)
    assert outputs[0] == 1
    assert isinstance(outputs[1], ModelRunnerOutput)
    assert 0 <= outputs[1].sampled_token_ids[0][0] < CONFIG.vocab_size


def test_steps_on_another_thread_have_as_many_threads_to_help_as_those_on_the_first():
    before = torch.get_num_threads()
    worker = Worker(CONFIG, random_weights(), replace(OPTIONS, num_threads=1))
    executor = UniProcExecutor(worker, CONFIG.vocab_size)
    request = new_request("a", [1, 2, 3], block_ids=[0], temperature=0.0)
    told: list[int] = []

    def step(plan: SchedulerOutput) -> None:
        torch.set_num_threads(2)
        executor.submit(plan).result()
        told.append(torch.get_num_threads())

    for plan in (plan_of({"a": 3}, new=[request]), plan_of({"a": 1})):
        thread = threading.Thread(target=step, args=(plan,))
        thread.start()
        thread.join()
    torch.set_num_threads(before)
    assert told == [1, 1]


def test_engines_that_share_a_host_share_what_one_would_take_for_its_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu.model_loader.available_memory", lambda: 2**20)
    options = replace(OPTIONS, max_model_len=None)
    sizes = [
        Worker(CONFIG, random_weights(), replace(options, kv_cache_share=share)).kv_cache_size.num_blocks
        for share in (1.0, 0.5, 0.25)
    ]
    assert sizes == [256, 128, 64]


def test_a_context_too_long_for_the_model_is_refused_before_anything_is_read():
    def unread():
        raise AssertionError("the weights were read")
        yield

    with pytest.raises(ConfigError, match="max_model_len is 257"):
        Worker(CONFIG, unread(), WorkerOptions(device="cpu", max_model_len=257))


def test_a_context_too_long_for_the_cache_is_refused():
    options = WorkerOptions(dtype="float32", device="cpu", max_model_len=256, kv_cache_memory=2**14)
    with pytest.raises(ConfigError, match=r"max_model_len is 256.*max_model_len=64 works"):
        Worker(CONFIG, random_weights(), options)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "nonsense"])
def test_a_device_that_is_not_there_is_named(device: str):
    with pytest.raises(ConfigError, match=rf"device is {device}: .*device=cpu works"):
        resolve_device(device)


def test_dtype_auto_suits_the_device():
    half = ModelConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__} | {"torch_dtype": "float16"})
    assert resolve_dtype("auto", half, "cuda") == torch.float16
    assert resolve_dtype("auto", half, "cpu") in (torch.bfloat16, torch.float32)
    assert resolve_dtype("float32", half, "cuda") == torch.float32
    gguf = open_model(str(embedded_gguf())).config  # whose file names no type
    assert resolve_dtype("auto", gguf, "cuda") == torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype is int8.*dtype=auto works"):
        resolve_dtype("int8", half, "cpu")


def test_sums_of_products_are_kept_in_float32_on_a_card():
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = True
    Worker(CONFIG, random_weights(), OPTIONS)
    assert not settings.allow_bf16_reduced_precision_reduction
    assert not settings.allow_fp16_reduced_precision_reduction


def test_bfloat16_and_float16_run_on_a_cpu():
    for dtype in ("bfloat16", "float16"):
        options = WorkerOptions(dtype=dtype, device="cpu", max_model_len=64, max_num_seqs=8, block_size=BLOCK_SIZE)
        executor = UniProcExecutor(Worker(CONFIG, random_weights(), options), CONFIG.vocab_size)
        assert all(len(t) == 3 for t in generate(executor, prompts(), chunk=9, num_tokens=3).values())


def test_a_batch_that_is_kept_on_the_device_says_the_same():
    greedy = [request for request in prompts() if request.sampling.greedy]
    expected = generate(UniProcExecutor(Worker(CONFIG, random_weights(), OPTIONS), CONFIG.vocab_size), greedy, chunk=6)
    worker = Worker(CONFIG, random_weights(), replace(OPTIONS, runner="device"))
    executor = UniProcExecutor(worker, CONFIG.vocab_size)
    assert generate(executor, greedy, chunk=6) == expected
    assert executor.pipeline_depth == 1  # on a CPU a step does not run on by itself
    assert not executor.prepare()
    executor.shutdown()
    assert not executor.prepare()


def tiny_gguf(path: Path, seed: int) -> Path:
    return TinyGGUF(path).add_weights(tiny_weights(TINY, seed)).save()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_no_blocks_are_kept_of_a_model_whose_file_was_replaced_after_it_was_opened(
    is_replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_model(str(tiny_gguf(tmp_path / "model.gguf", 0)))
    if is_replaced:
        os.replace(tiny_gguf(tmp_path / "new.gguf", 1), tmp_path / "model.gguf")
    executor = load_executor(files, replace(OPTIONS, kv_cache_dir=tmp_path / "kv", kv_cache_dir_size=2**24))
    try:
        assert executor.tier is not None
        assert bool(executor.tier._stores) is not is_replaced
        assert ("no KV blocks are stored: the model's files were changed" in caplog.text) is is_replaced
    finally:
        executor.shutdown()


@needs_library
def test_blocks_of_keys_and_values_in_8_bits_are_kept_apart_from_others(tmp_path: Path) -> None:
    files, counts = open_model(str(tiny_gguf(tmp_path / "model.gguf", 0))), []
    for kind in ("auto", "int8", "int8"):
        options = replace(OPTIONS, dtype="auto", kv_cache_dtype=kind, kv_cache_dir=tmp_path / "kv")
        executor = load_executor(files, replace(options, kv_cache_dir_size=2**24))
        executor.shutdown()
        counts.append(len([each for each in (tmp_path / "kv").iterdir() if each.is_dir()]))
    assert counts == [1, 2, 2]


def test_a_directory_without_a_whole_key_is_said_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_bytes(b"torn")
    (tmp_path / "key").chmod(0o600)
    files = open_model(str(tiny_gguf(tmp_path / "model.gguf", 0)))
    executor = load_executor(files, replace(OPTIONS, kv_cache_dir=tmp_path, kv_cache_dir_size=2**24))
    executor.shutdown()
    assert executor.tier is None
    assert f"no KV blocks are stored in {tmp_path}: " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["kv_cache_dir_size", "kv_cache_ram"])
def test_a_tier_that_no_piece_fits_into_is_refused(setting: str, tmp_path: Path) -> None:
    sizes: Any = {"kv_cache_dir_size": 2**24, "kv_cache_ram": 2**24, setting: 1000}
    files = open_model(str(tiny_gguf(tmp_path / "model.gguf", 0)))
    executor = UniProcExecutor(Worker(CONFIG, random_weights(), OPTIONS), CONFIG.vocab_size)
    try:
        with pytest.raises(ConfigError, match=f"{setting} is 1000 bytes: .* at least 2MiB, which hold [0-9]+ tokens"):
            executor.open_tier(files, replace(OPTIONS, kv_cache_dir=tmp_path / "kv", **sizes), None)
    finally:
        executor.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_profile_tells_what_the_device_does_and_changes_nothing(dtype: str) -> None:
    """With torch, and with the C library."""
    config, options = replace(CONFIG, head_dim=16), replace(OPTIONS, dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in tensor_shapes(config).items()}
    told = []
    for is_profiled in (False, True):
        given = weights if dtype == "float32" else {name: tensor.numpy() for name, tensor in weights.items()}
        executor = UniProcExecutor(Worker(config, given.items(), options), config.vocab_size)
        if is_profiled:
            executor.start_profile()
        began = time.monotonic()
        told.append([executor.submit(plan).result().sampled_token_ids for plan in two_steps()])
        ended = time.monotonic()
        events = executor.stop_profile()
        assert executor.stop_profile() == []
        executor.submit(plan_of({f"r{index}": 1 for index in range(len(prompts()))})).result()
        executor.shutdown()
        if not is_profiled:
            assert events == []
            continue
        calls = [event for event in events if event["name"] == ("aten::mm" if dtype == "float32" else "forward")]
        assert len(calls) >= 2
        for call in calls:
            assert began * 1e6 - 1e3 <= call["ts"] <= call["ts"] + call["dur"] <= ended * 1e6 + 1e3
    assert told[0] == told[1]


def test_a_profile_of_torch_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.profile.MAX_PROFILE_BYTES", 1000)
    profile = TorchProfile()
    torch.ones(3).sum()
    with pytest.raises(ProfileTooLarge):
        profile.stop()


def two_steps() -> list[SchedulerOutput]:
    new = prompts()
    prefill = plan_of({request.request_id: len(request.token_ids) for request in new}, new=new)
    return [prefill, plan_of({request.request_id: 1 for request in new})]
