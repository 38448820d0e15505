"""Prefixes that lie in a tier are loaded while others run, and whoever leaves meanwhile leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from engine.commands import Close
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest, EventKind, FinishReason
from engine.scheduler.tiers import PATIENCE, PAUSE
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import assert_nothing_left, make_core, make_request, run_to_end, simulated, tokens_of
from tests.engine.simulated_tier import SimulatedTier

PROMPT = list(range(100, 139))


class StillTier(SimulatedTier):
    """One in which nothing fails, and a load ends when the test says so."""

    arrives = takes = pays = True

    def store(self, name: bytes, block_ids: Sequence[int]) -> bool:
        return self.takes and super().store(name, block_ids)

    def poll(self, seconds: float) -> list[tuple[int, int, str | None]]:
        wanted, self._wanted = (self._wanted, []) if self.arrives else ([], self._wanted)
        return [(ticket, index, self._copy_in(name, ids)) for ticket, index, name, ids in wanted]

    def is_cheaper(self, seconds: float) -> bool:
        return self.pays


def core_with_tier(chunks: SimulatedTier | None = None, **options: int | bool) -> tuple[EngineCore, StillTier]:
    """A core of blocks of 4 tokens and chunks of 2 blocks; `chunks` is a tier whose chunks it finds."""
    core = make_core(**options)  # type: ignore[arg-type]
    executor = simulated(core)
    tier = StillTier(executor, dict.fromkeys(range(executor.num_blocks), ""), blocks_per_chunk=2, failures=0.0)
    if chunks is not None:
        tier.chunks = chunks.chunks
    executor.tier = tier
    return EngineCore(core.config, executor), tier


def run(core: EngineCore, request: EngineCoreRequest) -> list[int]:
    core.add(request)
    tokens = tokens_of(run_to_end(core)[request.request_id])
    for _ in range(100):
        core.prepare()
    return tokens


def test_a_prefix_is_found_after_a_restart_and_counts_as_cached() -> None:
    core, tier = core_with_tier()
    tokens = run(core, make_request(PROMPT, max_tokens=4))
    assert len(tier.chunks) == 5  # 40 tokens of 43, whoever generated them
    core, tier = core_with_tier(tier)
    request = make_request(PROMPT, max_tokens=4)
    core.add(request)
    outputs = run_to_end(core)[request.request_id]
    assert tokens_of(outputs) == tokens
    assert outputs[0].num_cached_tokens == 32  # whole chunks of what comes before the last token
    assert simulated(core).computed[request.request_id] == len(PROMPT) - 32 + 3
    events = [(event.kind, event.tokens) for event in outputs[0].events or ()]
    loaded = [(EventKind.LOADING, 32), (EventKind.LOADED_FROM_DISK, 32)]
    assert events[:3] == [*loaded, (EventKind.SCHEDULED, 32)]
    assert_nothing_left(core)


def test_a_used_prompt_is_marked_from_its_end_once_it_is_stored() -> None:
    core, tier = core_with_tier()
    tier.takes = False
    core.add(make_request(PROMPT, max_tokens=1))
    run_to_end(core)
    assert tier.touched == []
    tier.takes = True
    core.prepare()
    stored = list(tier.chunks)
    assert tier.touched == stored  # in the order of the prompt
    assert len(stored) == len(PROMPT) // 8
    tier.touched = []
    run(core, make_request([*PROMPT[:16], *range(50)], max_tokens=1))  # its beginning is cached on the device
    assert tier.touched[:2] == stored[:2]
    assert len(tier.touched) == 66 // 8
    loader, loading_tier = core_with_tier(tier)
    run(loader, make_request(PROMPT, max_tokens=1))
    assert loading_tier.touched == stored


def test_only_prompts_are_stored_where_answers_have_other_bits() -> None:
    core, tier = core_with_tier(prompt_form_differs=True)
    run(core, make_request(PROMPT[:20], max_tokens=30))
    assert len(tier.chunks) == 2


def test_another_tenant_or_salt_finds_nothing() -> None:
    core, tier = core_with_tier()
    run(core, make_request(PROMPT, max_tokens=1))
    for stranger in (make_request(PROMPT, max_tokens=1, tenant="blue"), make_request(PROMPT, max_tokens=1)):
        core, tier = core_with_tier(tier)
        if not stranger.tenant:
            stranger.cache_salt = "pepper"
        run(core, stranger)
        assert simulated(core).computed[stranger.request_id] == len(PROMPT)
        assert not tier.seen["loads"]


def loading(core: EngineCore, tier: StillTier) -> EngineCoreRequest:
    request = make_request(PROMPT, max_tokens=4)
    tier.arrives = False
    core.add(request)
    core.step()
    assert core.scheduler.requests[request.request_id].load is not None
    return request


def test_a_request_that_is_being_loaded_is_deferred_and_what_no_tier_has_is_missed() -> None:
    core, tier = core_with_tier()
    run(core, make_request(PROMPT, max_tokens=1))
    core, tier = core_with_tier(tier)
    loading(core, tier)
    other = make_request(list(range(20)), max_tokens=1)
    core.add(other)
    stats = core.report().stats
    assert (stats.num_waiting, stats.num_deferred) == (2, 1), "the other only waits for a step"
    tier.arrives = True
    missed = 0
    while core.scheduler.requests:
        missed += core.step().stats.tier_misses
    assert missed == 20 + len(PROMPT) - 32
    core = make_core()
    core.add(make_request(PROMPT, max_tokens=1))
    assert core.step().stats.tier_misses == 0, "without a tier none was asked"


@pytest.fixture
def filled() -> StillTier:
    core, tier = core_with_tier()
    run(core, make_request(PROMPT, max_tokens=1))
    return tier


def test_whoever_loads_holds_up_nobody_and_is_held_up_by_nobody(filled: StillTier) -> None:
    core, tier = core_with_tier(filled, max_num_seqs=1)
    request = loading(core, tier)
    other = make_request([7, 8, 9], max_tokens=2)
    core.add(other)
    outputs = [output for _ in range(3) for output in core.step().outputs]
    assert {output.request_id for output in outputs} == {other.request_id}
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    tier.arrives = True
    assert len(tokens_of(run_to_end(core)[request.request_id])) == 4
    assert_nothing_left(core)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT])
def test_leaving_while_loading_leaves_nothing(filled: StillTier, reason: FinishReason) -> None:
    core, tier = core_with_tier(filled)
    request = loading(core, tier)
    core.finish_request(request.request_id, reason)
    assert tier.seen["loads cut short"] == 1
    assert_nothing_left(core)


def test_a_deadline_holds_while_loading(filled: StillTier) -> None:
    now = [0.0]
    core, tier = core_with_tier(filled)
    core.clock = lambda: now[0]
    tier.arrives = False
    request = make_request(PROMPT, max_tokens=4)
    request.deadline = 5.0
    core.add(request)
    assert not core.step().outputs
    now[0] = 6.0
    assert [output.finish_reason for output in core.step().outputs] == [FinishReason.TIMEOUT]
    assert_nothing_left(core)


def test_requests_of_one_prefix_load_it_once(filled: StillTier) -> None:
    core, tier = core_with_tier(filled)
    requests = [loading(core, tier) for _ in range(3)]
    core.finish_request(requests[0].request_id, FinishReason.ABORT)
    tier.arrives = True
    outputs = run_to_end(core)
    assert tier.seen["loads"] == 1
    assert all(outputs[request.request_id][0].num_cached_tokens >= 32 for request in requests[1:])
    assert_nothing_left(core)


def test_who_joins_a_shorter_load_loads_the_rest_of_its_own_next(filled: StillTier) -> None:
    core, tier = core_with_tier(filled)
    short, parting, long = (make_request(prompt, max_tokens=1) for prompt in (PROMPT[:19], [*PROMPT[:11], 1], PROMPT))
    tier.arrives = False
    for request in (short, long, parting):
        core.add(request)
        core.step()
    tier.arrives = True
    outputs = run_to_end(core)
    for request, cached, loaded in ((short, 16, [16]), (parting, 8, [8]), (long, 32, [16, 16])):
        output = outputs[request.request_id][0]
        assert output.num_cached_tokens == cached
        events = [event.tokens for event in output.events or () if event.kind is EventKind.LOADED_FROM_DISK]
        assert events == loaded
    assert tier.seen["loads"] == 2
    assert_nothing_left(core)


def test_who_runs_gets_the_blocks_of_who_loads(filled: StillTier) -> None:
    core, tier = core_with_tier(filled, num_blocks=12, max_model_len=48)
    runner = make_request([5], max_tokens=40)
    core.add(runner)
    core.step()
    request = loading(core, tier)
    for _ in range(30):
        core.step()
    assert core.scheduler.requests[request.request_id].load is None
    assert core.scheduler.requests[runner.request_id].num_preemptions == 0
    outputs = run_to_end(core)
    assert len(tokens_of(outputs[request.request_id])) == 4
    assert outputs[request.request_id][0].num_cached_tokens == 0
    assert_nothing_left(core)


def test_a_load_that_does_not_end_is_computed_and_for_a_while_nothing_is_loaded(
    filled: StillTier, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1.0]
    core, tier = core_with_tier(filled)
    core.clock = lambda: now[0]
    loading(core, tier)
    now[0] += PATIENCE + 0.1
    assert [len(tokens_of(each)) for each in run_to_end(core).values()] == [4]
    assert tier.seen["loads cut short"] == 1
    assert "No KV block was loaded" in caplog.text
    for later, loads in ((0.0, 1), (PAUSE, 2)):
        now[0] += later
        core.scheduler.kv.reset()
        tier.arrives = True
        core.add(make_request(PROMPT, max_tokens=4))
        assert [len(tokens_of(each)) for each in run_to_end(core).values()] == [4]
        assert tier.seen["loads"] == loads
    assert_nothing_left(core)


def test_a_chunk_that_cannot_be_had_is_computed(filled: StillTier) -> None:
    core, tier = core_with_tier(filled)
    names = list(tier.chunks)
    request = loading(core, tier)
    del tier.chunks[names[2]]
    tier.arrives = True
    outputs = run_to_end(core)[request.request_id]
    assert outputs[0].num_cached_tokens == 16
    assert len(tokens_of(outputs)) == 4
    assert_nothing_left(core)


def test_what_cannot_be_trusted_is_not_kept() -> None:
    core, tier = core_with_tier()
    request = make_request(PROMPT, max_tokens=40)
    core.add(request)
    for _ in range(8):
        core.step()
        core.scheduler.kv.tiers.write_back(None)  # type: ignore[union-attr]
    assert tier.chunks
    core.scheduler.fail(request.request_id, "not finite")
    assert not tier.chunks
    assert isinstance(core.executor, CheckedExecutor)


def test_an_engine_that_ends_stores_what_waits_for_a_moment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for takes, stored in ((True, 4), (False, 0)):
        now = [0.0]
        core, tier = core_with_tier()
        monkeypatch.setattr("engine.scheduler.tiers.time", SimpleNamespace(monotonic=lambda now=now: now[0]))
        tier.takes = False  # it is busy
        core.add(make_request(PROMPT, max_tokens=1))
        run_to_end(core)
        tier.takes = takes
        tier.wait = lambda now=now: now.__setitem__(0, now[0] + 0.1)  # type: ignore[method-assign,misc]
        core.carry_out(Close())
        core.shutdown()
        assert len(tier.chunks) == stored
        assert now[0] < 2.0
    assert "chunks were not stored before shutdown" in caplog.text


def test_what_is_private_is_not_stored_and_who_finds_it_stores_its_own_copy() -> None:
    core, tier = core_with_tier()
    request = make_request(PROMPT, max_tokens=1)
    request.is_private = True
    run(core, request)
    assert not tier.chunks
    run(core, make_request([*PROMPT, *PROMPT[:9]], max_tokens=1))
    assert len(tier.chunks) == 6  # with the beginning, which nobody could do without


def test_what_comes_last_is_not_stored_where_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduler.tiers.MAX_BACKLOG", 3)
    core, tier = core_with_tier()
    tier.takes = False
    core.add(make_request(PROMPT, max_tokens=1))
    run_to_end(core)
    tier.takes = True
    for _ in range(100):
        core.prepare()
    again, _ = core_with_tier(tier)
    request = make_request(PROMPT, max_tokens=1)
    again.add(request)
    assert run_to_end(again)[request.request_id][0].num_cached_tokens == 24


def test_nothing_is_loaded_or_stored_while_that_would_not_pay(filled: StillTier) -> None:
    core, tier = core_with_tier(filled)
    for pays in (False, True):
        tier.pays = pays
        core.scheduler.kv.reset()
        run(core, make_request([*PROMPT, 1, 2, *PROMPT], max_tokens=1))
        assert bool(tier.seen["loads"]) == bool(tier.seen["stores"]) == pays
