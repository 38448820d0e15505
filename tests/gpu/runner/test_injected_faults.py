"""Whatever fails between planning a step and accounting for it: no other request gets a wrong token, then or later.

A seeded storm of 300 exceptions, in every stage of a step, before and after the work of the stage, with a small random
Llama under the real engine at both pipeline depths. All rounds of one core share prompts, so a wrong block that could
be found in the prefix cache would show in a later round.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import gpu.device.runner
from engine.core.core import EngineCore
from engine.core.participants import StepCosts
from engine.errors import EngineDead
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from gpu.device.runner import DeviceStep
from gpu.device.tables import DeviceRows, Upload
from gpu.executor import UniProcExecutor
from gpu.models.decoder import CausalLM
from gpu.runner.host_runner import InputBatch, ModelRunner
from gpu.runner.prompt_outputs import PromptOutputs
from gpu.runner.rows import RowTable, StepShape
from gpu.runner.runner import FinishedStep
from gpu.sampling.logits import Biases
from gpu.worker import Worker
from tests.gpu.device_runners import MAX_MODEL_LEN, MAX_NUM_SEQS, crowd, make_core
from tests.gpu.test_executor import CONFIG, OPTIONS, random_weights

FAULTS = 75  # for each runner and depth, so 300 in all
FAULTS_PER_ROUND = 25

ENGINE_STAGES: list[tuple[Any, str]] = [
    (EngineCore, "_before_submit"),
    (StepCosts, "before_update"),
    (KVCacheManager, "commit"),
    (Request, "append_output_tokens"),
    (RowTable, "apply"),
    (RowTable, "_add"),
    (RowTable, "_append_blocks"),
    (RowTable, "shape"),
    (RowTable, "advance"),
    (Biases, "remove"),
    (PromptOutputs, "apply"),
    (CausalLM, "forward"),
    (StepShape, "output"),
    (UniProcExecutor, "submit"),
]
STAGES: dict[str, list[tuple[Any, str]]] = {
    "host": [
        *ENGINE_STAGES,
        (InputBatch, "add"),
        (InputBatch, "append_blocks"),
        (InputBatch, "remove"),
        (InputBatch, "inputs"),
        (InputBatch, "record"),
        (ModelRunner, "_sample"),
        (FinishedStep, "result"),
    ],
    "device": [
        *ENGINE_STAGES,
        (DeviceRows, "add"),
        (DeviceRows, "append_blocks"),
        (DeviceRows, "remove"),
        (DeviceRows, "send_shape"),
        (Upload, "send"),
        (gpu.device.runner, "start_download"),
        (DeviceStep, "result"),
    ],
}


class InjectedError(Exception):
    pass


class Faults:
    """Wraps every stage; at most one fault is armed at a time, and strikes at a call of its stage."""

    def __init__(self, stages: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._draw = random.Random(seed)
        self._names = [f"{owner.__name__}.{name}" for owner, name in stages]
        self._armed: str | None = None
        self._calls_left = 0
        self._strikes_after = False
        self.struck: Counter[str] = Counter()
        for (owner, name), label in zip(stages, self._names, strict=True):
            monkeypatch.setattr(owner, name, self._wrapped(label, getattr(owner, name)))

    def arm(self) -> None:
        """Choose the next fault, unless one is armed: the stages take turns."""
        if self._armed is not None:
            return
        self._armed = self._names[self.struck.total() % len(self._names)]
        self._calls_left = self._draw.randrange(12)
        self._strikes_after = self._draw.random() < 0.5

    def disarm(self) -> None:
        self._armed = None

    def _wrapped(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any, **kwargs: Any) -> Any:
            if self._armed != label:
                return function(*args, **kwargs)
            self._calls_left -= 1
            if self._calls_left >= 0:
                return function(*args, **kwargs)
            self._armed = None
            self.struck[label] += 1
            if self._strikes_after:
                function(*args, **kwargs)
            raise InjectedError(label)

        return stage


def uniproc(kind: Any) -> UniProcExecutor:
    options = replace(OPTIONS, num_threads=1, runner=kind, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)
    return UniProcExecutor(Worker(CONFIG, random_weights(), options), CONFIG.vocab_size)


def run_round(
    core: EngineCore, requests: list[EngineCoreRequest], name: str, faults: Faults | None
) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Two requests arrive with each step."""
    requests = [replace_id(request, f"{name}-{request.request_id}") for request in requests]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, FinishReason | None] = dict.fromkeys(tokens)
    waiting, most = list(requests), (faults.struck.total() + FAULTS_PER_ROUND if faults else 0)
    for _ in itertools.count():
        for request in waiting[:2]:
            core.add(request)
        del waiting[:2]
        if not (core.has_work or waiting):
            break
        if faults is not None and faults.struck.total() < min(most, FAULTS):
            faults.arm()
        batch = core.step()
        core.scheduler.check_integrity()
        for output in batch.outputs:
            assert ends[output.request_id] is None
            tokens[output.request_id] += output.new_token_ids
            ends[output.request_id] = output.finish_reason
    return {each.removeprefix(f"{name}-"): (tokens[each], ends[each]) for each in tokens}


def replace_id(request: EngineCoreRequest, request_id: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        arrival_time=0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_storm_of_faults_gives_nobody_a_wrong_token(kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = crowd(1)
    expected = run_round(make_core(uniproc(kind), 1, num_blocks=20), requests, "alone", None)
    executor = uniproc(kind)
    faults = Faults(STAGES[kind], monkeypatch, seed=100 + depth)
    core = make_core(executor, depth, num_blocks=20)
    num_failed = 0
    for number in itertools.count():
        if faults.struck.total() == FAULTS:
            break
        for name, (tokens, end) in run_round(core, requests, f"round{number}", faults).items():
            right, right_end = expected[name]
            if end is FinishReason.ERROR:
                num_failed += 1
                assert tokens == right[: len(tokens)], name
            else:
                assert (tokens, end) == (right, right_end), name
        faults.disarm()
        # Afterwards, with whatever is in the cache now.
        assert run_round(core, requests, f"canaries{number}", None) == expected
        assert not core.has_work
        assert len(executor._worker.runner.rows) == 0  # type: ignore[union-attr]
    assert set(faults.struck) == set(faults._names)
    # Those that were being accounted for, and those that two faults in a row met alone.
    assert num_failed < FAULTS // 2


@pytest.mark.parametrize("stage", ["schedule", "update"])
def test_an_engine_whose_own_accounts_fail_says_that_it_is_dead(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(uniproc("host"), 2, num_blocks=20)
    for request in crowd(1)[:4]:
        core.add(request)
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, stage, raise_injected)
        with pytest.raises(InjectedError):
            core.step()
    with pytest.raises(EngineDead, match="restart"):
        core.step()


def raise_injected(*args: Any, **kwargs: Any) -> SchedulerOutput:
    raise InjectedError
