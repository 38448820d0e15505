"""What is recorded of steps is told once, and whatever goes wrong with it ends no step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.commands import Answered, Ask, Profile, Question, StartProfile, StopProfile
from engine.core.core import EngineCore
from engine.errors import ProfileTooLarge
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import make_core, make_request, run_to_end, tokens_of

FULL = OSError(28, "No space left on device")


class ProfiledExecutor(CheckedExecutor):
    """Tells an event of itself, or raises."""

    error: Exception | None = None
    num_running = 0

    def start_profile(self) -> None:
        self.num_running += 1

    def stop_profile(self) -> list[dict[str, Any]]:
        self.num_running -= 1
        if self.error is not None:
            raise self.error
        return [{"name": "device"}]


def profiled_core() -> tuple[EngineCore, ProfiledExecutor]:
    executor = ProfiledExecutor(64, 4, 1000)
    return EngineCore(make_core().config, executor), executor


def ask(core: EngineCore, question: Question) -> Answered:
    answered = core.carry_out(Ask(1, question))
    assert isinstance(answered, Answered)
    return answered


def stop(core: EngineCore) -> Profile:
    profile = ask(core, StopProfile()).answer
    assert isinstance(profile, Profile)
    return profile


@pytest.mark.parametrize("num_steps", [3, 100])  # it ends with a step, and with the question
@pytest.mark.parametrize("error", [FULL, ProfileTooLarge("100341526 bytes")])
def test_an_executor_that_cannot_tell_ends_no_request(error: Exception, num_steps: int) -> None:
    core, executor = profiled_core()
    executor.error = error
    ask(core, StartProfile(num_steps))
    core.add(make_request(range(9), max_tokens=8))
    assert [len(tokens_of(outputs)) for outputs in run_to_end(core).values()] == [8]
    answered = ask(core, StopProfile())
    if error is FULL:
        assert answered.answer is None
        assert "OSError" in answered.error
    else:
        assert answered.answer == Profile(num_steps=min(num_steps, core.num_steps), is_too_large=True)
    assert stop(core).num_steps == 0, "it was told once"
    assert executor.num_running == 0


def test_a_second_start_drops_what_the_first_has_recorded() -> None:
    core, executor = profiled_core()
    ask(core, StartProfile(100))
    core.add(make_request(range(9), max_tokens=8))
    core.step()
    executor.error = FULL
    assert ask(core, StartProfile(2)).answer is not None
    executor.error = None
    run_to_end(core)
    profile = stop(core)
    assert profile.num_steps == 2
    names = [event["name"] for event in json.loads(profile.events)]
    assert (names.count("execute"), names.count("device")) == (2, 1)
    assert executor.num_running == 0


def test_what_is_too_much_for_an_answer_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.participants.MAX_PROFILE_BYTES", 300)
    core = make_core()
    ask(core, StartProfile(100))
    core.add(make_request(range(9), max_tokens=8))
    run_to_end(core)
    assert stop(core) == Profile(num_steps=core.num_steps, is_too_large=True)
    assert stop(core).num_steps == 0
