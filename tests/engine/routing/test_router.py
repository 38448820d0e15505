"""Which engine gets a request: the one that knows how it begins, unless it has too much to do."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs.table import Curve, StepCostTable
from engine.kv_events import MIN_CHUNK as CHUNK
from engine.kv_events import KVEvents
from engine.messages import EngineCoreRequest
from engine.routing.prefix_index import PrefixIndex
from engine.routing.router import PREFILL_WEIGHT, TOKENS_PER_ANSWER, Router
from tests.engine import helpers

ALL = (0, 1, 2)
SLOTS = 10_000  # more than anybody here takes


def make_request(prompt: Sequence[int], *, tenant: str = "", max_tokens: int | None = None) -> EngineCoreRequest:
    return helpers.make_request(prompt, tenant=tenant, max_tokens=max_tokens)


def prompt(first: int, chunks: int = 4, tail: int = 0) -> list[int]:
    """Whole chunks that only prompts of the same `first` share, and a tail."""
    return [first * 1000 + i for i in range(chunks * CHUNK)] + [tail]


def choose(router: Router, token_ids: list[int], tenant: str = "") -> int:
    return place(router, make_request(token_ids, tenant=tenant))


def place(router: Router, *choices: EngineCoreRequest, alive: Sequence[int] = ALL) -> int:
    """Choices of one prompt."""
    first = choices[0]
    return router.choose(
        [choice.request_id for choice in choices],
        first.prompt_token_ids,
        alive,
        tenant=first.tenant,
        max_tokens=first.sampling.max_tokens,
    )


def end(router: Router, *requests: EngineCoreRequest) -> None:
    for request in requests:
        router.ended(request.request_id, by_itself=False)


def costs(token: float, speed: float = 1.0) -> StepCostTable:
    """Of a device that takes 10 ms for a step of 32, and so much more for a token of a prompt."""
    steps, tokens = [0.01 / speed, 0.01 / speed], [token / speed, 512 * token / speed]
    sizes = [1, 512]
    return StepCostTable(
        decode=Curve([1, 32], steps), prefill=Curve(sizes, [0.0, 512 * token / speed]), mixed=Curve(sizes, tokens)
    )


def test_unknown_prompts_go_where_least_is_to_do() -> None:
    router = Router(3, SLOTS)
    assert sorted(choose(router, [number]) for number in range(3)) == [0, 1, 2]
    assert sorted(choose(router, [number]) for number in range(3)) == [0, 1, 2]


def test_nobody_waits_for_one_engine_while_another_has_slots() -> None:
    """Though the one says that it is ten times as fast."""
    router = Router(2, 4)
    router.set_costs(0, costs(0.001, speed=10.0))
    router.set_costs(1, costs(0.001))
    requests = [make_request([number]) for number in range(10)]
    chosen = [place(router, request, alive=(0, 1)) for request in requests]
    assert sorted(chosen[:8]) == [0] * 4 + [1] * 4
    assert chosen[8:] == [0, 0], "by seconds, where neither has any"
    end(router, requests[chosen.index(1)])
    assert place(router, make_request([99]), alive=(0, 1)) == 1
    end(router, *(request for request, engine in zip(requests[6:8], chosen[6:8], strict=True) if engine == 1))
    both = make_request([98])
    other = msgspec.structs.replace(both, request_id="other")
    assert place(router, both, other, alive=(0, 1)) == 1
    assert place(router, make_request([97]), alive=(0, 1)) == 0


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    router = Router(2, SLOTS)
    request = make_request(range(5000))
    long = place(router, request, alive=(0, 1))
    assert [place(router, make_request([i]), alive=(0, 1)) for i in range(9)] == [1 - long] * 9


def test_a_prompt_goes_where_the_longest_part_of_it_is_known() -> None:
    router = Router(3, SLOTS)

    requests = [make_request(prompt(1)), make_request(prompt(2))]
    first, other = (place(router, request, alive=ALL) for request in requests)
    assert first != other
    end(router, *requests)
    assert choose(router, prompt(1, chunks=2, tail=5)) == first
    assert choose(router, prompt(2, tail=7)) == other
    branching = make_request(prompt(1)[:-1] + [9] * CHUNK + [1])
    branch = place(router, branching, alive=[3 - first - other])
    end(router, branching)
    assert branch not in (first, other)
    assert choose(router, [*prompt(1)[:-1], *[9] * CHUNK, 3]) == branch, "who knows a chunk more is better"


def test_less_than_a_chunk_is_not_worth_a_detour() -> None:
    router = Router(2, SLOTS)
    token_ids = list(range(CHUNK - 1))
    assert [place(router, make_request(token_ids), alive=(0, 1)) for _ in range(2)] == [0, 1]


def test_a_known_beginning_does_not_make_a_queue() -> None:
    router = Router(2, SLOTS)
    chosen = [place(router, make_request(prompt(1, chunks=16, tail=i)), alive=(0, 1)) for i in range(40)]
    assert chosen[0] == chosen[1], "while there is little to do it stays"
    assert 10 <= chosen.count(0) <= 30
    assert abs(router.loads[0] - router.loads[1]) <= PREFILL_WEIGHT * 16 * CHUNK / TOKENS_PER_ANSWER + 2


def test_who_has_spilled_over_is_known_in_both_places() -> None:
    router = Router(2, SLOTS)
    requests = [make_request(prompt(1, tail=i)) for i in range(12)]
    chosen = [place(router, request, alive=(0, 1)) for request in requests]
    assert set(chosen) == {0, 1}
    for request, engine in zip(requests, chosen, strict=True):
        if engine == 1:
            end(router, request)
    assert place(router, make_request(prompt(1, tail=99)), alive=(0, 1)) == 1


def test_tenants_share_no_beginnings() -> None:
    router = Router(3, SLOTS)
    long = prompt(1, chunks=16)
    first = choose(router, long, tenant="a")
    assert choose(router, long, tenant="b") != first
    assert choose(router, long, tenant="a") == first


def test_choices_of_one_prompt_stay_together_and_count_it_once() -> None:
    router = Router(3, SLOTS)
    shared = list(range(TOKENS_PER_ANSWER))
    children = [msgspec.structs.replace(make_request([1]), prompt_token_ids=shared) for _ in range(8)]
    chosen = place(router, *children, alive=ALL)
    assert router.loads[chosen] == pytest.approx(8 + 1)
    assert sum(router.loads) == pytest.approx(8 + 1)
    end(router, *children)
    assert router.loads == [0.0, 0.0, 0.0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500)), min_size=60, max_size=120), st.floats(0, 1e-3))
@settings(deadline=None)
def test_an_engine_that_is_twice_as_fast_gets_twice_the_work(sizes: list[tuple[int, int]], token: float) -> None:
    router = Router(2, SLOTS)
    for engine, speed in enumerate((1.0, 2.0)):
        router.set_costs(engine, costs(token, speed))
    price = costs(token)
    work, largest = [0.0, 0.0], 0.0
    for number, (num_prompt_tokens, max_tokens) in enumerate(sizes):
        request = make_request(range(10_000 * number, 10_000 * number + num_prompt_tokens), max_tokens=max_tokens)
        seconds = num_prompt_tokens * (price.mixed.at(128) / 128) + min(max_tokens, 256) * 0.01 / 32
        work[place(router, request, alive=(0, 1))] += seconds
        largest = max(largest, seconds)
    assert router.loads == pytest.approx([work[0], work[1] / 2])
    assert abs(work[1] - 2 * work[0]) <= (1 + PREFILL_WEIGHT) * largest, "but for the latest requests"


@given(st.integers(1000, 8000), st.floats(1e-5, 1e-3))
@settings(deadline=None)
def test_a_long_prompt_counts_as_what_it_takes(length: int, token: float) -> None:
    router = Router(2, SLOTS)
    router.set_costs(0, costs(token))  # the other has not told, and is taken to be like it
    long = place(router, make_request(range(length), max_tokens=1), alive=(0, 1))
    answer = 0.01 / 32 * 256 + token
    expected = length * token / answer
    others = [place(router, make_request([-i]), alive=(0, 1)) for i in range(1, int(expected) + 4)]
    assert others.index(long) == pytest.approx(expected, abs=max(1.5, 0.02 * expected))


def test_what_is_computed_is_no_work_any_more_and_ended_answers_tell_how_long_they_get() -> None:
    router = Router(1, SLOTS)
    request = make_request(prompt(1))
    place(router, request, alive=[0])
    assert router.loads == [pytest.approx(1 + len(prompt(1)) / TOKENS_PER_ANSWER)]
    router.advanced(request.request_id, 64)
    assert router.loads == [pytest.approx(0.75)]
    router.ended(request.request_id, by_itself=True)
    assert router.loads == [0.0]
    router.set_costs(0, costs(0.0))
    place(router, make_request([1]), alive=[0])
    assert router.loads == [pytest.approx(64 * 0.01 / 32)]


def test_an_engine_that_has_gone_is_forgotten() -> None:
    router = Router(3, SLOTS)
    first = choose(router, prompt(1))
    rest = [engine for engine in ALL if engine != first]
    router.forget(first)
    assert router.loads[first] == 0.0
    assert place(router, make_request(prompt(1)), alive=rest) in rest
    assert choose(router, prompt(1)) in rest, "its cache has gone with it"


def test_an_engine_is_worth_what_it_has_to_do_and_what_only_its_cache_holds() -> None:
    router = Router(3, 8)
    router.set_costs(0, costs(0.001))
    place(router, make_request(prompt(9)), alive=[0])
    for engine, chunks in ((1, [1, 2, 3]), (2, [3])):
        stored = array("Q", chunks).tobytes()
        assert router.apply(engine, KVEvents(epoch=1, sequence=1, stored=stored, removed=b"", is_whole=True))
    lost = [router.seconds_lost_with(engine) for engine in ALL]
    assert lost[0] == router.loads[0] > lost[1] > lost[2] == 0.0


def test_only_engines_that_live_are_chosen() -> None:
    router = Router(3, SLOTS)
    choose(router, prompt(1))
    assert [place(router, make_request(prompt(1)), alive=[2]) for _ in range(20)] == [2] * 20


def test_the_memory_of_beginnings_is_bounded_and_keeps_what_is_used() -> None:
    router = Router(3, SLOTS, index=PrefixIndex(max_guesses=40))
    request = make_request(prompt(1))
    first = place(router, request)
    end(router, request)
    for number in range(2, 200):
        requests = [make_request(prompt(each)) for each in ([number, 1] if number % 5 == 0 else [number])]
        for request in requests:
            place(router, request, alive=ALL)
            end(router, request)
    assert len(router.index._guesses) == 40
    assert sys.getsizeof(router.index._guesses) < 20_000
    assert choose(router, prompt(1)) == first
