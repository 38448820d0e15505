"""What the page is shown is what happened: every step once, with everybody who was in it and who has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from app.observability.frames import Frame, make_frame
from engine.commands import GetSnapshot
from engine.core.core import EngineCore
from engine.messages import FinishReason
from tests.engine.helpers import make_core, make_request, simulated


def frames(core: EngineCore, every: int) -> Iterator[Frame]:
    """A frame after so many steps, until there is nothing to do."""
    latest, after = 0, 0.0
    while core.has_work:
        for _ in range(every):
            if core.has_work:
                core.step()
        state = core.snapshot(GetSnapshot(after, 64))
        yield msgspec.json.decode(msgspec.json.encode(make_frame(state, after_step=latest)))
        latest, after = state.steps[-1].step, state.time


def test_frames_tell_of_every_step_once_and_of_all_who_were_in_it() -> None:
    core = make_core(num_blocks=34, max_num_seqs=3, max_num_batched_tokens=16)
    for number in range(5):
        core.add(make_request(range(30), f"r{number}", max_tokens=60))
    steps: list[int] = []
    left: Counter[str] = Counter()
    for frame in frames(core, 7):
        for step in frame["steps"]:
            steps.append(step["step"])
            plan = simulated(core).plans[step["step"] - 1]
            assert [frame["requests"][row[0]] for row in step["rows"]] == plan.request_ids
            assert [row[1] for row in step["rows"]] == plan.num_scheduled_tokens
            assert [row[2] for row in step["rows"]] == plan.num_sampled_tokens
            left.update(why for _, why in step["left"])
    assert steps == list(range(1, core.num_steps + 1))
    assert left["length"] == 5
    assert left["preempted"] == sum(len(plan.new_requests) for plan in simulated(core).plans) - 5 > 0


def test_a_frame_tells_who_was_ended_from_outside() -> None:
    core = make_core()
    for name in ("gone", "stays"):
        core.add(make_request(range(9), name, max_tokens=9))
    core.step()
    core.finish_request("gone", FinishReason.ABORT)
    core.step()
    frame = make_frame(core.snapshot(), after_step=1)
    (step,) = frame["steps"]
    assert [(frame["requests"][number], why) for number, why in step["left"]] == [("gone", "abort")]
    assert [request.request_id for request in frame["running"]] == ["stays"]


def test_a_frame_lists_some_requests_and_counts_all() -> None:
    core = make_core(max_num_seqs=4)
    for number in range(20):
        core.add(make_request(range(9), tenant=f"t{number % 3}", max_tokens=9))
    core.step()
    frame = make_frame(core.snapshot(GetSnapshot(most_requests=3)))
    assert (len(frame["running"]), len(frame["waiting"])) == (3, 3)
    assert (frame["num_running"], frame["num_waiting"]) == (3, 17)
    assert sum(tenant.num_waiting for tenant in frame["tenants"]) == 17


def test_a_frame_says_how_long_the_oldest_request_that_never_ran_has_waited() -> None:
    core = make_core(max_num_seqs=1)
    assert make_frame(core.snapshot())["oldest_wait"] is None
    for arrival in (7.0, 3.0, 5.0):
        core.add(msgspec.structs.replace(make_request(range(9), max_tokens=9), arrival_time=arrival))
    core.step()
    snapshot = core.snapshot()
    (running,) = snapshot.running
    oldest = min({7.0, 3.0, 5.0} - {running.arrival_time})
    assert make_frame(snapshot)["oldest_wait"] == snapshot.time - oldest
