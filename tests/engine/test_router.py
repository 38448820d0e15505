"""Which engine gets a request: the one that knows how it begins, unless it has too much to do."""

from __future__ import annotations

import sys

from engine.commands import AddRequests
from engine.messages import EngineCoreRequest
from engine.transport.router import CHUNK, EXTRA_LOAD, Router, weights
from tests.engine.helpers import make_request

ALL = (0, 1, 2)


def prompt(first: int, chunks: int = 4, tail: int = 0) -> list[int]:
    """Whole chunks that only prompts of the same `first` share, and a tail."""
    return [first * 1000 + i for i in range(chunks * CHUNK)] + [tail]


def choose(router: Router, token_ids: list[int], tenant: str = "") -> int:
    return router.choose(added(make_request(token_ids, tenant=tenant)), ALL)


def added(*requests: EngineCoreRequest) -> AddRequests:
    return AddRequests.of(requests)


def end(router: Router, engine: int, *requests: EngineCoreRequest) -> None:
    for weight in weights(added(*requests)):
        router.ended(engine, weight)


def test_unknown_prompts_go_where_least_is_to_do() -> None:
    router = Router(3)
    assert sorted(choose(router, [number]) for number in range(3)) == [0, 1, 2]
    assert sorted(choose(router, [number]) for number in range(3)) == [0, 1, 2]


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    router = Router(2)
    request = make_request(range(5000))
    long = router.choose(added(request), (0, 1))
    assert [router.choose(added(make_request([i])), (0, 1)) for i in range(9)] == [1 - long] * 9


def test_a_prompt_goes_where_the_longest_part_of_it_is_known() -> None:
    router = Router(3)

    def run(token_ids: list[int]) -> int:
        chosen = choose(router, token_ids)
        busy.append((chosen, make_request(token_ids)))
        return chosen

    busy: list[tuple[int, EngineCoreRequest]] = []
    first, other = run(prompt(1)), run(prompt(2))
    assert first != other
    for chosen, request in busy:
        end(router, chosen, request)
    assert choose(router, prompt(1, chunks=2, tail=5)) == first
    assert choose(router, prompt(2, tail=7)) == other
    branch = router.choose(added(make_request(prompt(1)[:-1] + [9] * CHUNK)), [3 - first - other])
    assert branch not in (first, other)
    assert choose(router, [*prompt(1)[:-1], *[9] * CHUNK, 3]) == branch, "who knows a chunk more is better"


def test_less_than_a_chunk_is_not_worth_a_detour() -> None:
    router = Router(2)
    token_ids = list(range(CHUNK - 1))
    assert [router.choose(added(make_request(token_ids)), (0, 1)) for _ in range(2)] == [0, 1]


def test_a_known_beginning_does_not_make_a_queue() -> None:
    router = Router(2)
    chosen = [router.choose(added(make_request(prompt(1, tail=i))), (0, 1)) for i in range(40)]
    assert set(chosen[: int(EXTRA_LOAD) - 1]) == {chosen[0]}, "while there is little to do it stays"
    assert 10 <= chosen.count(0) <= 30
    assert abs(router.loads[0] - router.loads[1]) <= max(router.loads) / 4 + EXTRA_LOAD + 2


def test_who_has_spilled_over_is_known_in_both_places() -> None:
    router = Router(2)
    requests = [make_request(prompt(1, tail=i)) for i in range(12)]
    chosen = [router.choose(added(request), (0, 1)) for request in requests]
    assert set(chosen) == {0, 1}
    for request, engine in zip(requests, chosen, strict=True):
        if engine == 1:
            end(router, engine, request)
    assert router.choose(added(make_request(prompt(1, tail=99))), (0, 1)) == 1


def test_tenants_share_no_beginnings() -> None:
    router = Router(3)
    first = choose(router, prompt(1), tenant="a")
    assert choose(router, prompt(1), tenant="b") != first
    assert choose(router, prompt(1), tenant="a") == first


def test_choices_of_one_prompt_stay_together_and_count_it_once() -> None:
    router = Router(3)
    children = [make_request(range(512))] * 8
    chosen = router.choose(added(*children), ALL)
    assert router.loads[chosen] == 8 + 1
    assert sum(router.loads) == 8 + 1
    end(router, chosen, *children)
    assert router.loads == [0.0, 0.0, 0.0]


def test_an_engine_that_has_gone_is_forgotten() -> None:
    router = Router(3)
    first = choose(router, prompt(1))
    rest = [engine for engine in ALL if engine != first]
    router.forget(first)
    assert router.loads[first] == 0.0
    assert router.choose(added(make_request(prompt(1))), rest) in rest
    assert choose(router, prompt(1)) in rest, "its cache has gone with it"


def test_only_engines_that_live_are_chosen() -> None:
    router = Router(3)
    choose(router, prompt(1))
    assert [router.choose(added(make_request(prompt(1))), [2]) for _ in range(20)] == [2] * 20


def test_the_memory_of_beginnings_is_bounded_and_keeps_what_is_used() -> None:
    router = Router(3, max_chunks=40)
    first = choose(router, prompt(1))
    for number in range(2, 200):
        end(router, choose(router, prompt(number)), make_request(prompt(number)))
        if number % 5 == 0:
            end(router, choose(router, prompt(1)), make_request(prompt(1)))
    assert len(router._seen) == 40
    assert sys.getsizeof(router._seen) < 20_000
    assert choose(router, prompt(1)) == first
