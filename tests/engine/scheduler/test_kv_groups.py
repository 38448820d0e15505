"""Groups of layers that keep different things of a request, over one pool of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.core import EngineCore
from engine.plan import most_blocks, owned
from engine.scheduler.request import Request
from tests.engine.helpers import assert_nothing_left, make_core, make_request, run_to_end

WINDOW = 10  # of blocks of 4 tokens: three before the next token's, and its own


def test_a_window_gives_back_what_no_token_to_come_sees() -> None:
    core = make_core(windows=(None, WINDOW), max_num_batched_tokens=16)
    core.add(make_request(range(60), "request", max_tokens=30))
    for _ in range(4):
        core.step()
    request = core.scheduler.requests["request"]
    assert request.num_computed_tokens == 60
    full, window = request.block_ids[::2], request.block_ids[1::2]
    assert len(owned(full)) == len(full) == len(window) == 15
    assert owned(window) == window[-3:], "of tokens 51 to 59"
    assert request.snapshot().num_blocks == 18
    run_to_end(core)
    assert_nothing_left(core)


def test_more_long_requests_fit_where_most_groups_have_a_window() -> None:
    """Five groups of six: 96 tokens take 24 blocks of the full one, and 8 of each other in chunks of 16 tokens."""
    windows = (None, *[WINDOW] * 5)
    each = most_blocks(windows, 4, 96, max_step_tokens=16)
    assert each == 24 + 5 * 8
    core = make_core(windows=windows, num_blocks=4 * each, max_num_batched_tokens=16, max_model_len=96)
    for number in range(4):
        core.add(make_request([number] * 80, max_tokens=16))
    most = 0
    while core.has_work:
        assert core.step().stats.num_preemptions == 0
        most = max(most, len(core.scheduler.running))
    assert most == 4, "where 144 blocks each would let one run"


def cached(core: EngineCore, prompt: Sequence[int]) -> int:
    """How much of a prompt a request finds, which computes and publishes the rest."""
    request = make_request(prompt, max_tokens=1)
    core.add(request)
    return run_to_end(core)[request.request_id][0].num_cached_tokens


def forget(core: EngineCore, prompt: Sequence[int], places: Iterable[int]) -> None:
    """Have the second group's blocks at these places taken for something else."""
    kv = core.scheduler.kv
    request = Request(make_request(prompt), sequence_number=0, eos_token_ids=(), max_model_len=128)
    for index in places:
        found = kv.pool.find(kv.block_hash(request, index) + bytes([1]))
        assert found is not None
        kv.pool.withdraw([found])


def test_a_prefix_is_hit_where_every_group_has_what_the_next_token_sees() -> None:
    core = make_core(windows=(None, WINDOW))
    assert cached(core, range(60)) == 0
    for length in (60, 41, 17, 5, 4):
        assert cached(core, [*range(length), 999]) == length // 4 * 4, "what has left the window is there still"
    forget(core, range(60), range(11))
    assert cached(core, range(60)) == 56, "which needs the blocks from 11 to 13"
    forget(core, range(60), [12])
    assert cached(core, range(60)) == 0, "no three blocks are left before any place"
    assert cached(core, range(60)) == 56, "they are now"
    forget(core, range(60), [12])
    assert cached(core, range(60)) == 48, "those from 9 to 11 are there this time"


def test_what_an_answer_leaves_behind_its_window_pushes_nothing_else_out() -> None:
    core = make_core(windows=(None, WINDOW), num_blocks=30 + 28 + 6, max_num_batched_tokens=16, max_model_len=128)
    assert cached(core, range(60)) == 0  # fifteen blocks of each group, all of which can be found
    answer = make_request(range(500, 508), max_tokens=100)  # of the full group 27 blocks, of the other five at a time
    core.add(answer)
    run_to_end(core)
    for length in (60, 41, 17):
        assert cached(core, [*range(length), 999]) == length // 4 * 4
    assert cached(core, [*range(500, 508), 999]) == 8, "what the prompt left is no answer"


def test_nothing_is_found_of_a_request_that_failed_not_even_what_left_its_window() -> None:
    core = make_core(windows=(WINDOW, None), max_num_batched_tokens=16)
    core.add(make_request(range(60), "request", max_tokens=30))
    for _ in range(5):
        core.step()
    assert core.scheduler.kv.pool.num_cached == 30
    core.scheduler.fail("request", "it is not to be trusted")
    assert core.scheduler.kv.pool.num_cached == 0
    run_to_end(core)
    assert_nothing_left(core)
