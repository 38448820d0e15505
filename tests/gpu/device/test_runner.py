"""The runner that keeps its batch on the device says what the one on the host says.

Both run a small random Llama under the real engine: chunked prefill, prefix cache, preemption by a small cache, mixed
batches. The device here is the CPU, so nothing is pinned and a graph is a function that is called again; what is the
same is every table, gather, scatter and the order of the work.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import StepAbandoned
from engine.messages import Pooling, StructuredOutput, StructuredOutputKind
from engine.plan import ModelRunnerOutput, TokenMasks
from gpu.device.graphs import Replay, ladder
from gpu.device.runner import DeviceRunner
from gpu.models.decoder import CausalLM
from protocol.openai.logprobs import most_likely
from tests.gpu.device_runners import (
    MAX_NUM_SEQS,
    MAX_TOKENS,
    VOCAB_SIZE,
    Again,
    crowd,
    drive,
    make_core,
    make_executor,
)
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request
from tests.gpu.test_executor import CONFIG


@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_requests_get_the_same_from_either_runner_at_either_depth(seed: int) -> None:
    requests = crowd(seed)
    expected = drive(make_core(make_executor("host"), 1, num_blocks=20), requests)
    assert len({tuple(tokens) for tokens, _ in expected.values()}) > 10
    device = make_executor("device")
    for executor, depth in ((make_executor("host"), 2), (device, 1), (device, 2)):
        assert drive(make_core(executor, depth, num_blocks=20), requests) == expected
    assert len(device.runner.rows) == 0


def test_graphs_and_padding_change_nothing() -> None:
    requests = crowd(3)
    expected = drive(make_core(make_executor("host"), 1, num_blocks=20), requests)
    graphs = Again()
    executor = make_executor("device", graphs)
    while executor.runner.prepare():
        pass
    assert graphs.num_captured == len(ladder(MAX_NUM_SEQS)) + len(ladder(MAX_TOKENS))
    assert drive(make_core(executor, 2, num_blocks=20), requests) == expected
    assert graphs.num_replayed > 30


def test_graphs_that_are_captured_while_requests_run_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.device.runner.STEPS_BETWEEN_CAPTURES", 3)
    requests = crowd(4, processors=False)
    expected = drive(make_core(make_executor("host"), 1, num_blocks=20), requests)
    graphs = Again()
    assert drive(make_core(make_executor("device", graphs), 2, num_blocks=20), requests) == expected
    assert graphs.num_replayed > 0


def test_a_seed_means_the_same_at_either_depth_and_within_a_graph() -> None:
    requests = crowd(5, greedy=False)
    executor = make_executor("device")
    expected = drive(make_core(executor, 1, num_blocks=20), requests)
    assert drive(make_core(executor, 2, num_blocks=20), requests) == expected
    graphs = Again()
    replaying = make_executor("device", graphs)
    while replaying.runner.prepare():
        pass
    assert drive(make_core(replaying, 2, num_blocks=20), requests) == expected
    assert graphs.num_replayed > 0


def test_log_probabilities_are_those_of_the_other_runner() -> None:
    request = new_request("a", [5, 6, 7], block_ids=[1, 2, 3], temperature=0.0, logprobs=3, frequency_penalty=1.0)
    plans = [plan_of({"a": 3}, new=[request]), plan_of({"a": 1}), plan_of({"a": 1})]
    found = []
    for kind in ("host", "device"):
        executor = make_executor(kind)
        found.append([executor.submit(plan).result().logprobs[0][0] for plan in plans])
    for host, device in zip(*found, strict=True):
        assert (device.token_id, device.rank) == (host.token_id, host.rank)
        assert device.logprob == pytest.approx(host.logprob, abs=1e-4)
        assert [token_id for token_id, _ in device.top] == [token_id for token_id, _ in host.top]
        assert [p for _, p in device.top] == pytest.approx([p for _, p in host.top], abs=1e-4)


def test_all_and_named_log_probabilities_are_those_of_both_runners() -> None:
    wanted = [
        new_request("all", [5, 6, 7], block_ids=[1], temperature=0.0, logprobs=-1, prompt_logprobs=-1),
        new_request("named", [5, 6, 7], block_ids=[2], temperature=0.0, logprobs=0, logprob_token_ids=(9, 3, 200)),
        new_request("none", [5, 6, 7], block_ids=[3], temperature=0.0),
        new_request("two", [5, 6, 7], block_ids=[4], temperature=0.0, logprobs=2),
    ]
    plan = plan_of({request.request_id: 3 for request in wanted}, new=wanted)
    for kind in ("host", "device"):
        output = make_executor(kind).submit(plan).result()
        assert sorted(output.logprobs) == [0, 1, 3]
        (everything,), (named,), (two,) = (output.logprobs[index] for index in (0, 1, 3))
        likely = most_likely(everything)
        assert sorted(token_id for token_id, _ in likely) == list(range(CONFIG.vocab_size))
        assert sum(math.exp(value) for _, value in likely) == pytest.approx(1.0, abs=1e-4)
        assert [value for _, value in likely] == sorted((value for _, value in likely), reverse=True)
        known = dict(likely)
        assert likely[0][0] == everything.token_id
        assert [token_id for token_id, _ in likely[:2]] == [token_id for token_id, _ in two.top]
        assert [token_id for token_id, _ in named.top] == [9, 3, 200, named.token_id]
        for token_id, value in ((everything.token_id, everything.logprob), *two.top, *named.top):
            assert value == pytest.approx(known[token_id], abs=1e-5)
        assert (named.token_id, named.every, two.every) == (two.token_id, None, None)
        prompt = output.prompt_logprobs[0]
        assert [entry.token_id for entry in prompt] == [6, 7]
        assert all(
            dict(most_likely(entry))[entry.token_id] == pytest.approx(entry.logprob, abs=1e-5) for entry in prompt
        )


def test_what_is_wanted_of_a_prompt_is_what_the_other_runner_gives() -> None:
    asking = [
        new_request("logprobs", range(9), block_ids=[0, 1, 2], temperature=0.0, prompt_logprobs=1),
        new_request("mean", range(20, 31), block_ids=[3, 4, 5], temperature=0.0, max_tokens=0),
    ]
    asking[1].pooling = Pooling.MEAN
    going_on = ["logprobs", "mean"]
    plans = [plan_of({"logprobs": 5, "mean": 4}, new=asking, going_on=going_on), plan_of({"logprobs": 4, "mean": 7})]
    outputs = []
    for kind in ("host", "device"):
        executor = make_executor(kind)
        outputs.append([executor.submit(plan).result() for plan in plans])
    for host, device in zip(*outputs, strict=True):
        assert device.sampled_token_ids == host.sampled_token_ids
        (found,), (expected,) = device.prompt_logprobs.values(), host.prompt_logprobs.values()
        assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    vectors = [np.frombuffer(steps[1].embeddings[1], dtype=np.float32) for steps in outputs]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


def test_a_grammar_is_asked_when_the_step_has_been_started_and_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [[3, 300], [17]]
    bits = np.zeros((2, 9), dtype=np.uint32)  # a word short of the vocabulary: what lies beyond is not allowed
    for row, token_ids in zip(bits, allowed, strict=True):
        for token_id in token_ids:
            if token_id < 288:
                row[token_id // 32] |= np.uint32(1 << token_id % 32)
    happened: list[str] = []

    class Masks:
        def result(self) -> TokenMasks:
            happened.append("asked")
            return TokenMasks(indices=np.array([0, 2]), bits=bits)

    def started(model: CausalLM, forward: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        happened.append("started")
        return forward(model, *given)

    sampled = []
    for executor in (make_executor("host"), make_executor("device"), make_executor("device", Again())):
        grammars = [None, None, StructuredOutput(kind=StructuredOutputKind.CHOICE, value='["a"]')]
        everyone = [
            new_request(f"r{i}", [i, 2, 3], block_ids=[i], temperature=0.0, logprobs=0, structured_output=grammars[i])
            for i in range(3)
        ]
        runner = executor.runner
        while runner.prepare():
            pass
        executor.submit(plan_of({r.request_id: 3 for r in everyone}, new=everyone)).result()
        with monkeypatch.context() as patch:
            patch.setattr(type(runner._model), "forward", partialmethod(started, type(runner._model).forward))
            plan = plan_of({r.request_id: 1 for r in everyone})
            plan.masks = Masks()
            output = executor.submit(plan).result()
        assert happened == ["started", "asked"]
        happened.clear()
        assert output.sampled_token_ids[0] == [3]
        assert output.sampled_token_ids[2] == [17]
        assert output.logprobs[2][0].logprob == pytest.approx(0.0, abs=1e-6)  # of what its grammar leaves
        assert output.logprobs[0][0].logprob < -1e-3  # the model's, where only ids are allowed
        sampled.append(output.sampled_token_ids)
    assert sampled[0] == sampled[1] == sampled[2]


def test_a_step_that_fails_or_is_broken_off_advances_nobody() -> None:
    executor = make_executor("device")
    everyone = [new_request(f"r{i}", [i, 2, 3], block_ids=[i], temperature=0.0) for i in range(2)]
    executor.submit(plan_of({"r0": 3, "r1": 3}, new=everyone)).result()
    with pytest.raises(StepAbandoned):
        executor.submit(plan_of({"r0": 1, "r1": 1}), lambda: True)
    with pytest.raises(KeyError):
        executor.submit(plan_of({"r0": 1, "nobody": 1}))
    going_on = executor.submit(plan_of({"r0": 1, "r1": 1})).result()
    undisturbed = make_executor("device")
    undisturbed.submit(plan_of({"r0": 3, "r1": 3}, new=everyone)).result()
    assert going_on == undisturbed.submit(plan_of({"r0": 1, "r1": 1})).result()


def test_blocks_of_a_step_that_fails_before_it_is_sent_are_on_the_device_as_they_are_in_the_row_table() -> None:
    everyone = [new_request(f"r{i}", [i, 2, 3], block_ids=[i], temperature=0.0) for i in range(2)]
    decodes, blocks = {"r0": 1, "r1": 1}, {"r0": [7], "r1": [8]}

    def decoded(first_fails: bool) -> list[ModelRunnerOutput]:
        executor = make_executor("device")
        executor.submit(plan_of({"r0": 3, "r1": 3}, new=everyone)).result()
        if first_fails:
            with pytest.raises(KeyError):
                executor.submit(plan_of(decodes | {"nobody": 1}, new_blocks=blocks))
        plans = [plan_of(decodes, new_blocks=None if first_fails else blocks), plan_of(decodes), plan_of(decodes)]
        return [executor.submit(plan).result() for plan in plans]

    assert decoded(True) == decoded(False)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_fail_before_or_while_they_are_sent_change_nothing(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    requests = crowd(6)
    expected = drive(make_core(make_executor("host"), 1, num_blocks=18), requests)
    executor = make_executor("device")
    draw, num_failed = random.Random(depth), 0
    runner = executor.runner
    assert isinstance(runner, DeviceRunner)

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal num_failed
            if len(executor.plans[-1].request_ids) > 1 and draw.random() < 0.1:  # of one alone it would be the fault
                num_failed += 1
                raise RuntimeError("this step")
            return method(*args)

        return call

    monkeypatch.setattr("engine.core.core.MAX_FAILURES_IN_A_ROW", 1000)
    monkeypatch.setattr(runner._sampler, "features", failing(runner._sampler.features))
    monkeypatch.setattr(runner._upload, "send", failing(runner._upload.send))
    assert drive(make_core(executor, depth, num_blocks=18), requests) == expected
    assert num_failed > 10


def test_numbers_that_are_not_finite_are_told() -> None:
    executor = make_executor("device")
    runner = executor.runner
    assert isinstance(runner, DeviceRunner)
    logits = runner._model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden).index_fill_(0, torch.tensor([1]), float("nan"))

    runner._sampler._compute_logits = broken
    everyone = [new_request(f"r{i}", [i, 2, 3], block_ids=[i], temperature=0.0) for i in range(3)]
    output = executor.submit(plan_of({r.request_id: 3 for r in everyone}, new=everyone)).result()
    assert output.not_finite == [1]
    assert all(0 <= token_id < VOCAB_SIZE for (token_id,) in output.sampled_token_ids)


def test_a_request_with_a_token_that_is_not_finite_is_told_though_nothing_of_it_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = make_executor("device")
    forward = CausalLM.forward

    def with_a_bad_token(self: CausalLM, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(self, input_ids, *rest).masked_fill((input_ids == 7)[:, None], float("inf"))

    monkeypatch.setattr(CausalLM, "forward", with_a_bad_token)
    new = [
        new_request("going on", [8, 7, *[8] * 10], block_ids=[1, 2, 3, 4, 5, 6], temperature=0.0),
        new_request("sound", [5, 6, 4], block_ids=[7, 8], temperature=0.0),
        new_request("ends", [5, 7, 4], block_ids=[9, 10], temperature=0.0),
    ]
    plan = plan_of({"going on": 7, "sound": 3, "ends": 3}, new=new, going_on=["going on"])
    assert executor.submit(plan).result().not_finite == [0, 2]


def test_graphs_that_cannot_be_had_are_done_without() -> None:
    class Refusing(Again):
        def capture(self, run: Callable[[], None]) -> Replay:
            raise RuntimeError("out of memory")

    executor = make_executor("device", Refusing())
    assert not executor.runner.prepare()
    request = new_request("a", [1, 2], block_ids=[0], temperature=0.0)
    assert executor.submit(plan_of({"a": 2}, new=[request])).result().sampled_token_ids[0][0] >= 0
