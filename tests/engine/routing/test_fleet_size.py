"""How many engines there should be, second by second."""

from __future__ import annotations

from engine.routing.router import (
    DOWNSCALE_SECONDS,
    MAX_QUEUED_SECONDS,
    UPSCALE_SECONDS,
    FleetSize,
    Router,
    wanted_engines,
)
from tests.engine.routing.test_router import costs

UP, DOWN = int(UPSCALE_SECONDS), int(DOWNSCALE_SECONDS)


def sizes(fleet: FleetSize, wanted: list[int]) -> list[int]:
    """By second."""
    return [fleet.update(each, float(second)) for second, each in enumerate(wanted)]


def test_a_fleet_grows_when_more_were_wanted_for_a_while() -> None:
    assert sizes(FleetSize(1, 4), [3] * (UP + 2)) == [1] * UP + [3, 3]


def test_a_moment_of_much_or_little_changes_nothing() -> None:
    assert set(sizes(FleetSize(1, 4), [1, 4, 4, 1] * UP)) == {1}
    fleet = FleetSize(1, 4)
    sizes(fleet, [3] * DOWN)
    assert {fleet.update(wanted, DOWN + second) for second, wanted in enumerate([1, 1, 3, 1] * 9)} == {3}


def test_it_shrinks_to_the_most_that_was_wanted_for_long() -> None:
    found = sizes(FleetSize(1, 4), [4] * (UP + 1) + [2] * (DOWN + 1) + [0] * (DOWN + 1))
    assert found[UP] == 4
    assert found[UP + DOWN : UP + DOWN + 2] == [4, 2]
    assert found[-2:] == [2, 1], "never fewer than the least"


def test_there_are_never_more_than_the_most() -> None:
    assert sizes(FleetSize(2, 4), [99] * (UP + 2))[-1] == 4


def test_work_that_waits_asks_for_engines_by_its_seconds() -> None:
    router = Router(3, 4)
    assert wanted_engines(*router.queued_and_running()) == 0
    for number in range(40):
        router.choose([str(number)], list(range(number, number + 64)), [0], max_tokens=256)
    queued, running = router.queued_and_running()
    assert (queued, running) == (0.0, 1.0), "nobody has told what work costs"
    router.set_costs(0, costs(0.001))
    queued, _ = router.queued_and_running()
    assert queued > MAX_QUEUED_SECONDS
    assert wanted_engines(queued, running) > wanted_engines(0.0, running) == 2
    assert queued <= router.loads[0], "what runs does not wait"
    for number in range(40):
        router.ended(str(number), by_itself=False)
    assert router.queued_and_running() == (0.0, 0.0)
