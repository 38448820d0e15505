"""The page's simulator asks for little at once: small bodies, short slices that end with who asked for them."""

from __future__ import annotations

import json

import anyio
import pytest

from app.dashboard import simulator
from app.dashboard.simulator import MAX_BODY, MAX_WORK, Simulator
from protocol.errors import ApiError

# Nearly all are refused, so that what has not ended never becomes too much, and a step takes ten seconds.
CROWD = {"rate": 1000, "step_seconds": 10, "admission": True, "input_len": 8192, "num_blocks": 4096}


def body(**piece: object) -> bytes:
    return json.dumps(piece).encode()


@pytest.mark.anyio
async def test_a_piece_of_a_crowd_is_told_as_far_as_its_work_goes() -> None:
    answer = json.loads(await Simulator().answer(body(parameters=CROWD, until=1e6)))
    assert answer["time"] < 10
    assert answer["kpis"]["num_sent"] * 512 <= MAX_WORK
    further = json.loads(await Simulator().answer(body(parameters=CROWD, since=answer["time"], until=1e6)))
    assert further["time"] > answer["time"]


@pytest.mark.anyio
async def test_work_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up, calls = simulator._catch_up, 0

    def counted(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        catch_up(*arguments)  # type: ignore[arg-type]
        if calls == 3:
            anyio.from_thread.run_sync(scope.cancel)

    monkeypatch.setattr(simulator, "_catch_up", counted)
    asked = Simulator()
    with anyio.CancelScope() as scope:
        await asked.answer(body(parameters=CROWD, since=1e6, until=1e6))
    assert scope.cancelled_caught
    assert calls == 3
    assert json.loads(await asked.answer(body(until=1)))["time"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (body(until=1, changes=[{"at": 0, "parameters": {"rate": 1}}], nonsense="x" * MAX_BODY), 413, "65536 bytes"),
        (body(parameters=CROWD, since=1e6, until=1e6), 400, "start a new simulation"),
        (body(until=1, parameters={f"n{number}": 1 for number in range(5000)}), 400, "n0"),
        (b"[" * 60_000, 400, "JSON"),
    ],
    ids=["long", "much before", "unknown parameters", "depth"],
)
async def test_what_asks_for_much_is_refused(content: bytes, status: int, words: str) -> None:
    with pytest.raises(ApiError, match=words) as error:
        await Simulator().answer(content)
    assert error.value.status == status
