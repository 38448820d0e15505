"""How a request ends, by what it says and by who leaves: each end has its reason and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.core import EngineCore
from engine.messages import FinishReason
from engine.scheduler.request import FINISH_REASONS, RequestStatus
from tests.engine.helpers import (
    assert_nothing_left,
    make_core,
    make_request,
    run_to_end,
    simulated,
    tokens_of,
)


def output_of(core: EngineCore, **sampling: Any) -> tuple[list[int], FinishReason | None, int | str | None]:
    request = make_request(range(5), **sampling)
    core.add(request)
    outputs = run_to_end(core)[request.request_id]
    assert all(output.finish_reason is None for output in outputs[:-1])
    return tokens_of(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason


def test_each_end_has_its_reason() -> None:
    free_run, reason, stop_reason = output_of(make_core())
    assert len(free_run) == 128 - 5
    assert (reason, stop_reason) == (FinishReason.LENGTH, None)  # the end of the context
    assert len(set(free_run[:5])) == 5
    eos, stop = free_run[2], free_run[4]

    assert output_of(make_core(), max_tokens=4) == (free_run[:4], FinishReason.LENGTH, None)
    assert output_of(make_core(eos_token_ids=(eos,)), max_tokens=9) == (free_run[:3], FinishReason.STOP, None)
    assert output_of(make_core(), max_tokens=9, stop_token_ids=(stop,)) == (free_run[:5], FinishReason.STOP, stop)
    assert output_of(make_core(eos_token_ids=(eos,)), max_tokens=9, stop_token_ids=(stop,), ignore_eos=True) == (
        free_run[:5],
        FinishReason.STOP,
        stop,
    )
    assert output_of(make_core(eos_token_ids=(eos,)), max_tokens=9, ignore_eos=True) == (
        free_run[:9],
        FinishReason.LENGTH,
        None,
    )
    # The token that is both the last allowed and a stop is a stop.
    assert output_of(make_core(), max_tokens=5, stop_token_ids=(stop,)) == (free_run[:5], FinishReason.STOP, stop)


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    free_run, *_ = output_of(make_core(), max_tokens=9)
    eos, stop = free_run[1], free_run[2]
    tokens, reason, _ = output_of(make_core(eos_token_ids=(eos,)), max_tokens=9, min_tokens=9, stop_token_ids=(stop,))
    assert (len(tokens), reason) == (9, FinishReason.LENGTH)
    assert not {eos, stop} & set(tokens)


def test_every_end_state_has_a_finish_reason_and_sorts_last() -> None:
    assert list(FINISH_REASONS) == [status for status in RequestStatus if status > RequestStatus.PREEMPTED]
    assert set(FINISH_REASONS.values()) == set(FinishReason)


# --- departures


def test_client_gone_while_queued_is_never_prefilled() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_request([1], "a", max_tokens=3))
    core.add(make_request([2], "gone", max_tokens=3))
    core.step()
    core.finish_request("gone", FinishReason.ABORT)
    run_to_end(core)
    assert set(simulated(core).computed) == {"a"}
    assert_nothing_left(core)


def test_client_gone_before_the_first_step_costs_no_step() -> None:
    core = make_core()
    core.add(make_request([1], "gone"))
    core.finish_request("gone", FinishReason.ABORT)
    assert_nothing_left(core)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_client_gone_while_running_gives_its_blocks_back_at_once(steps: int) -> None:
    core = make_core(max_num_batched_tokens=8)
    core.add(make_request(range(12), "gone"))
    for _ in range(steps):
        core.step()
    core.finish_request("gone", FinishReason.ABORT)
    assert core.scheduler.kv.usage == 0.0
    assert not core.step().outputs
    assert_nothing_left(core)


def test_client_gone_while_preempted_is_never_resumed() -> None:
    core = make_core(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=2)
    core.add(make_request([1] * 7, "a", max_tokens=12))
    core.add(make_request([2] * 7, "gone", max_tokens=12))
    while core.scheduler.requests["gone"].num_preemptions == 0:
        core.step()
    computed = simulated(core).computed["gone"]
    core.finish_request("gone", FinishReason.ABORT)
    run_to_end(core)
    assert simulated(core).computed["gone"] == computed
    assert_nothing_left(core)


def test_ending_an_unknown_or_finished_request_is_a_no_op() -> None:
    core = make_core()
    core.finish_request("nobody", FinishReason.ABORT)
    assert not core.has_work
    core.add(make_request([1], "a", max_tokens=1))
    core.step()
    core.finish_request("a", FinishReason.ABORT)
    run_to_end(core)
    core.finish_request("a", FinishReason.ABORT)
    assert_nothing_left(core)


def test_an_id_in_use_is_refused() -> None:
    core = make_core()
    core.add(make_request([1], "a"))
    with pytest.raises(KeyError, match="'a' is in use"):
        core.add(make_request([2], "a"))
