"""However a request's tokens are split over steps and mixed with others, it says the same."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.plan import NewRequestData, SchedulerOutput
from gpu.runner.host_runner import ModelRunner
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import ModelInputs, StageLinks
from tests.gpu.history_model import HistoryModel
from tests.gpu.runner.test_rows import plan_of, token_ids_of
from tests.gpu.sampling_helpers import new_request

VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 101, 4, 64, 40
MAX_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE


def make_runner() -> tuple[ModelRunner, HistoryModel]:
    model = HistoryModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)
    return ModelRunner(model, BatchSizes(6, MAX_MODEL_LEN, BLOCK_SIZE)), model


def requests() -> list[NewRequestData]:
    """Six requests of all kinds, each with its own blocks, in no particular order within the cache."""
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.9, "seed": 6, "top_p": 0.8, "top_k": 30},
        {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 8, "min_p": 0.2, "min_tokens": 4, "stop_token_ids": (1, 2, 3)},
    ]
    return [
        new_request(
            f"r{i}",
            [(i * 31 + j * j) % VOCAB for j in range(3 + 4 * i)],
            block_ids=[(b * 6 + i) for b in range(MAX_BLOCKS)][::-1],
            **kind,
        )
        for i, kind in enumerate(sampling)
    ]


def generate(chunk: int, everyone: list[NewRequestData], num_tokens: int = 8) -> dict[str, list[int]]:
    """Run all requests together, prefilling at most `chunk` tokens of each in a step."""
    runner, _ = make_runner()
    produced: dict[str, list[int]] = {r.request_id: [] for r in everyone}
    pending = {r.request_id: len(r.token_ids) for r in everyone}
    new = everyone
    while active := {r: n for r, n in pending.items() if len(produced[r]) < num_tokens}:
        going_on = [r for r, n in active.items() if n > chunk]
        plan = plan_of({r: min(chunk, n) for r, n in active.items()}, new=new, going_on=going_on)
        output = runner.submit(plan).result()
        for r, count, sampled in zip(
            plan.request_ids, plan.num_scheduled_tokens, output.sampled_token_ids, strict=True
        ):
            pending[r] -= count
            assert len(sampled) == (pending[r] == 0)
            if sampled:
                produced[r] += sampled
                pending[r] = 1
        new = []
    return produced


def test_chunked_prefill_says_what_whole_prefill_says():
    whole = generate(1000, requests())
    assert all(len(tokens) == 8 for tokens in whole.values())
    for chunk in (1, 2, 5):
        assert generate(chunk, requests()) == whole


def test_a_mixed_batch_says_what_each_request_says_alone():
    together = generate(3, requests())
    for request in requests():
        assert generate(3, [request]) == {request.request_id: together[request.request_id]}


def test_a_resumed_request_goes_on_as_if_it_had_never_been_preempted():
    uninterrupted = generate(1000, requests())
    runner, _ = make_runner()
    everyone = requests()
    tokens = {r.request_id: list(r.token_ids) for r in everyone}

    def run(plan: SchedulerOutput) -> None:
        output = runner.submit(plan).result()
        for r, sampled in zip(plan.request_ids, output.sampled_token_ids, strict=True):
            tokens[r] += sampled

    run(plan_of({r.request_id: len(r.token_ids) for r in everyone}, new=everyone))
    for _ in range(3):
        run(plan_of({r.request_id: 1 for r in everyone}))
    # Everybody loses their blocks; the others come back with new ones and all they had said.
    resumed = [
        new_request(
            r.request_id,
            tokens[r.request_id],
            num_prompt_tokens=r.num_prompt_tokens,
            block_ids=r.block_ids[::-1],
            stop_token_ids=tuple(r.stop_token_ids),
        )
        for r in everyone
    ]
    for request, original in zip(resumed, everyone, strict=True):
        request.sampling = original.sampling
    removed = [r.request_id for r in everyone]
    run(plan_of({r.request_id: len(r.token_ids) for r in resumed}, new=resumed, removed=removed))
    for _ in range(3):
        run(plan_of({r.request_id: 1 for r in everyone}))
    for r in everyone:
        assert tokens[r.request_id][r.num_prompt_tokens :] == uninterrupted[r.request_id]


def test_a_prefix_hit_computes_only_the_rest():
    runner, model = make_runner()
    prompt = list(range(10))
    first = runner.submit(
        plan_of({"a": 10}, new=[new_request("a", prompt, block_ids=[3, 1, 2], temperature=0.0)])
    ).result()
    hit = new_request("b", prompt, num_computed_tokens=8, block_ids=[3, 1, 9], temperature=0.0)
    second = runner.submit(plan_of({"b": 2}, new=[hit])).result()
    assert model.steps[-1].query_start_loc.tolist() == [0, 2]
    assert second.sampled_token_ids == first.sampled_token_ids


def test_output_is_parallel_to_the_plan_though_decodes_run_first():
    runner, model = make_runner()
    decoding = [new_request(f"d{i}", [i, i], block_ids=[i], temperature=0.0, logprobs=1) for i in range(2)]
    runner.submit(plan_of({"d0": 2, "d1": 2}, new=decoding)).result()
    # A prefill that ends, a decode, a prefill that goes on, a decode.
    ends = new_request("ends", [5, 6, 7], block_ids=[10], temperature=0.0, logprobs=0)
    goes_on = new_request("goes on", [8] * 12, block_ids=[11, 12, 13], temperature=0.0, logprobs=2)
    plan = plan_of({"ends": 3, "d1": 1, "goes on": 7, "d0": 1}, new=[ends, goes_on], going_on=["goes on"])
    output = runner.submit(plan).result()

    inputs = model.steps[-1]
    assert (inputs.num_decodes, np.diff(inputs.query_start_loc).tolist()) == (2, [1, 1, 3, 7])
    assert model.num_logit_rows[-1] == 3
    assert output.sampled_token_ids[2] == []
    assert sorted(output.logprobs) == [0, 1, 3]
    for index, (entry,) in output.logprobs.items():
        assert isinstance(entry, TokenLogprobs)
        assert ([entry.token_id], entry.rank) == (output.sampled_token_ids[index], 1)
    assert [len(output.logprobs[i][0].top) for i in (0, 1, 3)] == [0, 1, 1]
    # What was handed out is what the rows remember.
    for request_id, sampled in zip(plan.request_ids, output.sampled_token_ids, strict=True):
        if sampled:
            assert token_ids_of(runner.rows, runner.input_batch, request_id)[-1:] == sampled


def test_a_request_with_a_token_that_is_not_finite_is_told_though_nothing_of_it_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
):
    # Its blocks would be found by others, and attention brings what is not finite to tokens before it: 0 times NaN.
    runner, model = make_runner()
    forward = model.forward

    def with_a_bad_token(inputs: ModelInputs, *args: Any) -> NDArray[np.float32]:
        hidden = forward(inputs, *args)
        hidden[inputs.input_ids == 77] = np.nan
        hidden[inputs.input_ids == 78] = np.inf
        return hidden

    monkeypatch.setattr(model, "forward", with_a_bad_token)
    new = [
        new_request("going on", [8, 77, *[8] * 10], block_ids=[11, 12, 13], temperature=0.0),
        new_request("sound", [5, 6, 7], block_ids=[10], temperature=0.0),
        new_request("ends", [5, 78, 7], block_ids=[14], temperature=0.0),
    ]
    plan = plan_of({"going on": 7, "sound": 3, "ends": 3}, new=new, going_on=["going on"])
    assert runner.submit(plan).result().not_finite == [0, 2]


def test_a_plan_of_removals_alone_runs_nothing():
    runner, model = make_runner()
    runner.submit(plan_of({"a": 1}, new=[new_request("a", [1], block_ids=[0])])).result()
    output = runner.submit(plan_of({}, removed=["a"])).result()
    assert (output.sampled_token_ids, output.logprobs) == ([], {})
    assert (len(model.steps), len(runner.rows)) == (1, 0)


def test_a_step_in_which_nobody_samples_computes_no_logits():
    runner, model = make_runner()
    output = runner.submit(plan_of({"a": 2}, new=[new_request("a", [1, 2, 3], block_ids=[0])], going_on=["a"])).result()
    assert output.sampled_token_ids == [[]]
    assert model.num_logit_rows == []


def test_a_step_that_fails_advances_nobody(monkeypatch: pytest.MonkeyPatch):
    runner, model = make_runner()
    runner.submit(plan_of({"a": 2}, new=[new_request("a", [1, 2], block_ids=[0], temperature=0.0)])).result()
    before = token_ids_of(runner.rows, runner.input_batch, "a")
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.submit(plan_of({"a": 1})).result()
    assert token_ids_of(runner.rows, runner.input_batch, "a") == before
    assert runner.submit(plan_of({"a": 1})).result().sampled_token_ids[0][0] >= 0


def test_a_stage_that_does_not_sample_is_told_what_was_sampled():
    """Of the oldest step that it does not know the tokens of; of requests that are gone, whoever has their rows now, no
    more."""
    sent: list[NDArray[np.float32]] = []
    model = HistoryModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)
    runner = ModelRunner(model, BatchSizes(2, MAX_MODEL_LEN, BLOCK_SIZE), StageLinks(send=sent.append))
    a, b, c, late_b = (new_request(name, [5, 6, 7], block_ids=[3 * i, 3 * i + 1]) for i, name in enumerate("abcb"))

    def tokens(name: str) -> list[int]:
        return token_ids_of(runner.rows, runner.input_batch, name)

    output = runner.submit(plan_of({"a": 3}, new=[a])).result()
    assert output.sampled_token_ids == [[]]
    assert [hidden.shape for hidden in sent] == [(3, 1)]
    runner.submit(plan_of({"b": 3}, new=[b]))  # in flight too
    runner.record([[40]])
    assert tokens("a") == [5, 6, 7, 40]
    runner.submit(plan_of({"a": 1, "c": 3}, new=[c], removed=["b"]))  # b's row is c's
    runner.record([[41]])
    assert tokens("c")[:3] == [5, 6, 7]
    runner.record([[42], [43]])
    assert (tokens("a"), tokens("c")) == ([5, 6, 7, 40, 42], [5, 6, 7, 43])
    assert model.steps[-1].input_ids.tolist() == [40, 5, 6, 7]

    runner.submit(plan_of({"a": 1, "c": 1}))
    runner.submit(plan_of({"b": 3}, new=[late_b], removed=["a", "c"]))
    runner.record(None)  # abandoned at a later stage: everybody in it had left
    runner.record([[44]])
    assert tokens("b") == [5, 6, 7, 44]
