"""The page's simulator: the server's scheduler on a virtual clock. Each HTTP request simulates a short piece.

1. A request has all parameters, the times of their changes, and the wanted piece of time, so equal requests get equal
   answers. The state after the previous piece is kept for a while, and computed again if it is gone.
2. The work is done on one thread in short slices, so that it does not delay tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import msgspec
from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.observability.frames import MOST_REQUESTS, make_frame
from engine.commands import GetSnapshot
from protocol.errors import ApiError, to_api_error

if TYPE_CHECKING:
    from app.simulate.driver import Session

MAX_BODY = 64 * 1024  # bytes
MAX_KEPT, MAX_KEPT_TOKENS = 8, 2**22  # kept simulations, and their tokens: some 200 MB; at least one is kept
MAX_OPEN = 8  # requests at a time
MAX_STEPS = 100  # of one request or slice
MAX_WORK = 2**18  # of one request or slice: some 50 ms
MAX_AGAIN, MAX_WORK_AGAIN = 5000, 2**24  # repeated steps, and their work
MAX_LISTED = 256  # sent and ended requests of one answer

T = TypeVar("T")
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class Change(BaseModel):
    """New values of some parameters from a virtual time on."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    at: Seconds
    parameters: dict[str, Any]


class SimulationRequest(BaseModel):
    """The simulation, and the part of its time that the answer covers. Times are virtual seconds."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    parameters: dict[str, Any] = {}
    changes: list[Change] = Field(default=[], max_length=256)
    since: Seconds = 0.0
    until: Seconds
    max_steps: int = Field(default=MAX_STEPS, ge=1, le=MAX_STEPS)


class Simulator:
    """The simulator of all pages. Owned by the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Session] = OrderedDict()
        self._thread = anyio.CapacityLimiter(1)
        self._num_open = 0

    async def answer(self, body: bytes) -> bytes:
        """Return JSON: `time`, its `frame`, `kpis`, requests `sent` and `ended` in the piece. Raises ApiError."""
        if self._num_open == MAX_OPEN:
            raise ApiError(429, f"{MAX_OPEN} simulations are running already; try again later.", code="too_many_pages")
        if len(body) > MAX_BODY:
            raise ApiError(413, f"A simulation takes at most {MAX_BODY} bytes, got {len(body)}.")
        self._num_open += 1
        try:
            piece = await self._run(lambda: SimulationRequest.model_validate_json(body))
            session = self._kept.pop(_name(piece, piece.since), None) or await self._again(piece)
            answer = await self._run(lambda: _advance_and_describe(session, piece))
        finally:
            self._num_open -= 1
        self._kept[_name(piece, session.now)] = session
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._kept_tokens > MAX_KEPT_TOKENS):
            self._kept.popitem(last=False)
        return answer

    @property
    def _kept_tokens(self) -> int:
        return sum(session.kept_tokens for session in self._kept.values())

    async def _run(self, work: Callable[[], T]) -> T:
        """Run one slice of the work on the thread. Between two slices the work ends if the client leaves or the server
        stops. Raises ApiError 400 for values that the simulation refuses."""

        def run() -> T:
            try:
                return work()
            except ValidationError as error:
                raise to_api_error(error) from None
            except ValueError as error:
                raise ApiError(400, str(error)) from None

        return await to_thread.run_sync(run, limiter=self._thread)

    async def _again(self, piece: SimulationRequest) -> Session:
        """Simulate from 0 to the start of the piece."""
        session = await self._run(lambda: _begin(piece))
        due = [change for change in piece.changes if change.at < piece.since]
        changes = deque(sorted(due, key=lambda each: each.at))
        while changes or session.now < piece.since:
            await self._run(lambda: _catch_up(session, changes, piece.since))
        return session


def _begin(piece: SimulationRequest) -> Session:
    from app.simulate.driver import Parameters, Session  # imported late: serving does not need it

    return Session(Parameters.model_validate(piece.parameters))


def _catch_up(session: Session, changes: deque[Change], since: float) -> None:
    """Advance one slice towards the next change, else `since`; apply the change when reached."""
    simulation = session.simulation
    if simulation.num_steps >= MAX_AGAIN or simulation.work >= MAX_WORK_AGAIN:
        raise ValueError(f"since: it takes more than {MAX_AGAIN} short steps to get there; start a new simulation")
    until = changes[0].at if changes else since
    session.advance(until, MAX_STEPS, MAX_WORK)
    if changes and session.now >= until:
        session.change(**changes.popleft().parameters)


def _name(piece: SimulationRequest, now: float) -> bytes:
    """Return the key of the kept simulation at this time, before the changes of that time."""
    return msgspec.json.encode((piece.parameters, [(c.at, c.parameters) for c in piece.changes if c.at < now], now))


def _advance_and_describe(session: Session, piece: SimulationRequest) -> bytes:
    from app.simulate.driver import PRESETS

    since = session.now
    before = session.simulation.num_steps
    for change in piece.changes:
        if change.at == since:
            session.change(**change.parameters)
    session.advance(piece.until, piece.max_steps, MAX_WORK)
    simulation = session.simulation
    ended = [each for each in list(simulation.ended)[-MAX_LISTED:] if (each.end_time or 0.0) > since]
    sent = [each for each in [*ended, *simulation.open.values()] if each.start_time > since][-MAX_LISTED:]
    snapshot = session.core.snapshot(GetSnapshot(since, MOST_REQUESTS))
    first = [each.token_times[0] - each.start_time for each in ended if each.token_times]
    refused = {"admission": sum(each.is_refused for each in ended)} if any(each.is_refused for each in ended) else {}
    return msgspec.json.encode(
        {
            "time": session.now,
            "frame": make_frame(snapshot, after_step=before, service={"first_tokens": first, "refused": refused}),
            "kpis": session.kpis(),
            "sent": [(each.request_id, each.start_time, each.num_prompt_tokens) for each in sent],
            "ended": [(e.request_id, e.start_time, e.token_times[:1], e.end_time, len(e.token_times)) for e in ended],
            "parameters": session.parameters.model_dump(),
            "presets": {name: preset.model_dump() for name, preset in PRESETS.items()} if not piece.since else None,
        }
    )
