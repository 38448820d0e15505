"""What engines publish of their prefix caches is what can be found there, whatever gets lost on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.kv_events
from engine.commands import AddRequests, FinishRequests, PublishKVEvents, ResetPrefixCache
from engine.core.core import EngineCore
from engine.kv_events import KVEvents
from engine.messages import EngineCoreRequest, FinishReason
from engine.routing.prefix_index import PrefixIndex
from engine.routing.router import Router
from engine.scheduler.request import Request
from tests.engine.helpers import make_core, make_request, run_to_end

WINDOWS = [(None,), (None, 12), (12, 12)]
TENANTS = ("", "other")
CHUNK = 8


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kv_events, "MIN_CHUNK", CHUNK)


class Fleet:
    """Engines, a router that hears of them through a channel that may lose, repeat and reorder, and some prompts."""

    def __init__(self, seed: int, windows: tuple[int | None, ...], *, size: int = 2, prompt_form: bool = False) -> None:
        self.random = random.Random(seed)
        self.windows, self.prompt_form = windows, prompt_form
        self.router = Router(size, 8, key=b"of the fleet")
        self.router.describe(4, windows)
        self.cores = [self.start() for _ in range(size)]
        self.under_way: list[list[KVEvents]] = [[] for _ in range(size)]
        self.number = 0
        self.prompts: list[list[int]] = [[self.random.randrange(3) for _ in range(4)]]

    def start(self) -> EngineCore:
        core = make_core(num_blocks=60, windows=self.windows, max_model_len=64, prompt_form_differs=self.prompt_form)
        core.carry_out(PublishKVEvents(self.router.key))
        return core

    def add(self) -> None:
        """A prompt that begins like another one, or like another's answer goes on."""
        before = self.random.choice(self.prompts)
        more = [self.random.randrange(3) for _ in range(self.random.randrange(1, 20))]
        prompt = [*before[: self.random.randrange(len(before) + 1)], *more][:60]
        self.prompts.append(prompt)
        self.number += 1
        tenant = self.random.choice(TENANTS)
        request = make_request(prompt, f"r{self.number}", tenant=tenant, max_tokens=self.random.randrange(1, 4))
        self.random.choice(self.cores).carry_out(AddRequests.of([request]))

    def step(self, index: int) -> None:
        core = self.cores[index]
        if core.has_work:
            outputs = core.step()
        elif core.has_news:
            outputs = core.report()
        else:
            return
        if outputs.kv_events is not None:
            self.under_way[index].append(outputs.kv_events)

    def deliver(self, index: int) -> None:
        """All that is under way, in order. Who has missed something asks for everything."""
        events, self.under_way[index] = self.under_way[index], []
        for each in events:
            if not self.router.apply(index, each):
                self.cores[index].carry_out(PublishKVEvents(self.router.key))

    def settle(self) -> None:
        """Two round trips without losses, while something happens: in one a gap is noticed, then everything comes."""
        for _ in range(2):
            for index in range(len(self.cores)):
                self.add_to(index)
                while self.cores[index].has_work:
                    self.step(index)
                self.deliver(index)
            for index in range(len(self.cores)):
                self.step(index)
                self.deliver(index)

    def add_to(self, index: int) -> None:
        self.number += 1
        request = make_request([self.number + 10] * CHUNK, f"r{self.number}", max_tokens=1)
        self.cores[index].carry_out(AddRequests.of([request]))

    def beliefs(self) -> Iterator[tuple[int, int]]:
        """Of each prompt in each engine: how many tokens are believed to be found, and how many are."""
        for prompt in self.prompts:
            for tenant in TENANTS:
                for index, core in enumerate(self.cores):
                    yield self.believed(index, prompt, tenant), found(core, prompt, tenant)

    def believed(self, index: int, prompt: list[int], tenant: str) -> int:
        hashes = engine.kv_events.PrefixHashes(self.router.key, CHUNK, tenant, "")
        chunks = (hashes.extend(prompt) for _ in range((len(prompt) - 1) // CHUNK))
        _, known = self.router.index.find(chunks, 1 << index)
        return CHUNK * known[0][1] if known else 0


def found(core: EngineCore, prompt: list[int], tenant: str = "") -> int:
    """Tokens of a prompt that the scheduler would not compute."""
    message = EngineCoreRequest(
        request_id="x",
        prompt_token_ids=prompt,
        sampling=make_request([1]).sampling,
        arrival_time=0.0,
        tenant=tenant,
    )
    request = Request(message, sequence_number=0, eos_token_ids=(), max_model_len=128)
    kv = core.scheduler.kv
    return len(kv.find_prefix(request)) // kv.num_groups * kv.block_size


@given(st.integers(0, 2**32), st.sampled_from(WINDOWS), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_believed_is_there(seed: int, windows: tuple[int | None, ...], prompt_form: bool) -> None:
    """After every step, whatever was stored, shared, preempted, aborted, evicted or cleared in it."""
    fleet = Fleet(seed, windows, prompt_form=prompt_form)
    hits = 0
    for _ in range(60):
        if fleet.random.random() < 0.6:
            fleet.add()
        index = fleet.random.randrange(2)
        core = fleet.cores[index]
        match fleet.random.randrange(40):
            case 0:
                core.carry_out(ResetPrefixCache())
            case 1 | 2 if core.scheduler.requests:
                ended = fleet.random.choice(list(core.scheduler.requests))
                core.carry_out(FinishRequests([ended], FinishReason.ABORT))
            case 3:
                fleet.cores[index] = fleet.start()
                fleet.router.forget(index)
                fleet.under_way[index].clear()
        fleet.step(index)
        fleet.deliver(index)
        for each, core in enumerate(fleet.cores):
            if not core.has_news:
                for prompt in fleet.prompts[-6:]:
                    believed = fleet.believed(each, prompt, "")
                    hits += believed > 0
                    assert believed <= found(core, prompt)
    if windows == (None,) and not prompt_form:
        for index in range(2):
            for output in run_to_end(fleet.cores[index]).values():
                assert output
            fleet.step(index)
        assert hits, "and it is not nothing"


@given(st.integers(0, 2**32), st.sampled_from(WINDOWS))
@settings(max_examples=40, deadline=None)
def test_a_channel_that_loses_repeats_and_reorders_is_mended(seed: int, windows: tuple[int | None, ...]) -> None:
    fleet = Fleet(seed, windows)
    for _ in range(60):
        fleet.add()
        index = fleet.random.randrange(2)
        fleet.step(index)
        events = fleet.under_way[index]
        match fleet.random.randrange(5):
            case 0 if events:
                events.pop(fleet.random.randrange(len(events)))
            case 1 if events:
                events.append(fleet.random.choice(events))
            case 2:
                fleet.random.shuffle(events)
            case 3:
                fleet.cores[index] = fleet.start()  # without a word, and with what it said before still under way
            case _:
                continue
        fleet.deliver(index)
    for index in range(2):
        fleet.deliver(index)
    fleet.settle()
    assert all(believed <= there for believed, there in fleet.beliefs())


def test_a_prefix_is_believed_as_far_as_it_is_stored() -> None:
    fleet = Fleet(0, (None,), size=1)
    prompt = list(range(100, 140))
    fleet.cores[0].carry_out(AddRequests.of([make_request(prompt, max_tokens=2)]))
    while fleet.cores[0].has_work:
        fleet.step(0)
    fleet.deliver(0)
    assert fleet.believed(0, [*prompt, 1], "") == 40
    assert fleet.believed(0, [*prompt, 1], "other") == 0
    assert fleet.believed(0, [*prompt[:20], 1, *prompt[21:]], "") == 16
    fleet.cores[0].carry_out(ResetPrefixCache())
    assert fleet.cores[0].has_news, "which is told at once, though there is nothing to do"
    fleet.step(0)
    fleet.deliver(0)
    assert fleet.believed(0, [*prompt, 1], "") == 0
    assert fleet.router.index.num_bytes < 5000


def test_what_is_computed_again_after_a_preemption_is_told_again() -> None:
    fleet = Fleet(0, (None,), size=1)
    core = fleet.cores[0] = make_core(num_blocks=12, max_model_len=48)
    core.carry_out(PublishKVEvents(fleet.router.key))
    requests = [make_request(range(start, start + 20), f"r{start}", max_tokens=20) for start in (100, 200)]
    for request in requests:
        core.carry_out(AddRequests.of([request]))
    num_preemptions = 0
    while core.has_work:
        num_preemptions = max(num_preemptions, *(each.num_preemptions for each in core.scheduler.requests.values()), 0)
        fleet.step(0)
    fleet.deliver(0)
    assert num_preemptions
    for request in requests:
        prompt = [*request.prompt_token_ids, 1]
        assert fleet.believed(0, prompt, "") == found(core, prompt) // CHUNK * CHUNK
    assert found(core, prompt)


def test_nothing_is_published_unasked_and_nothing_twice() -> None:
    core = make_core()
    core.carry_out(AddRequests.of([make_request(range(40), max_tokens=30)]))
    assert core.step().kv_events is None
    core.carry_out(PublishKVEvents(b"key"))
    told = [core.step().kv_events for _ in range(20)]
    assert told[0] is not None
    assert told[0].is_whole
    later = [each for each in told[1:] if each is not None]
    assert 2 <= len(later) <= 4, "a chunk is full every eight tokens"
    assert all(len(each.stored) == 8 and not each.removed and not each.is_whole for each in later)


def test_the_memory_of_a_router_is_bounded() -> None:
    index = PrefixIndex(max_chunks=10)
    events = KVEvents(epoch=1, sequence=1, stored=b"".join(i.to_bytes(8, "little") for i in range(30)), removed=b"")
    assert index.apply(0, events)
    assert index.num_dropped == 20
    assert index.find(iter([3, 20]), 1) == ([3, 20], [(1, 1)])
    index.forget(0)
    assert index.find(iter([3]), 1) == ([3], [])


def test_what_makes_no_sense_is_not_believed() -> None:
    index = PrefixIndex()
    assert not index.apply(0, KVEvents(epoch=1, sequence=1, stored=b"12345", removed=b"", is_whole=False))
    assert index.publishes(0)
    assert index.find(iter([1]), 1) == ([1], [])
