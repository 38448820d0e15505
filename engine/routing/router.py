"""The expected work of each engine, the choice, and the size of the fleet.

A request is given to the engine that is expected to be done with it first: after the work that it has, and what of the
prompt it would have to compute. So who knows the beginning of a prompt gets it, until its queue is longer than what it
saves; then another computes the beginning too, and a beginning that many ask for is soon known in as many places as it
takes.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.costs.table import StepCostTable, TypicalRequest
from engine.kv_events import MIN_CHUNK, KVEvents, PrefixHashes, chunk_size
from engine.messages import FinishReason, RoutingStats
from engine.routing.prefix_index import PrefixIndex

Route = Literal["prefix", "load", "round-robin", "random"]

# Before any answer has ended, and before any engine has told what its steps cost: so long is an answer, and so many
# tokens of a prompt weigh as much as one.
UNKNOWN_ANSWER = 256
TOKENS_PER_ANSWER = 512
# A prompt that is computed where it was not known takes the time of all who wait there, and the place of what was known
# there: so many times does it count.
PREFILL_WEIGHT = 3.0
_STALE = 0.05  # of the length of answers: prices are made anew when it has changed by so much
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # of answers that tell how long answers get


class Work(msgspec.Struct, gc=False):
    """What of a choice an engine has still to compute, as far as can be told, in tokens."""

    engine: int
    prompt_tokens: int  # that no cache is thought to hold
    answer_tokens: int
    num_prompt_tokens: int
    guessed: list[int]  # chunks of the prompt that are held to be known there until it is computed
    num_output_tokens: int = 0


class Router:
    """Loads of engines 0 .. `size` - 1, and what is known in which of them.

    Loads are what was given to an engine and has not come back, never what it says of itself: that would be old, and
    would not have what is on its way. Seconds are by what the engine says of its steps, those of full batches: where
    one is empty, it does not matter.
    """

    def __init__(
        self,
        size: int,
        max_num_seqs: int,
        *,
        route: Route = "prefix",
        key: bytes | None = None,
        index: PrefixIndex | None = None,
        first: int = 0,
    ) -> None:
        """`max_num_seqs`: running slots of each engine. `key`: what the engines were told to hash with. `first`: who
        wins the first tie; several routers for the same engines have different ones. Of the other routes, `load` looks
        at no prefix, and the last two look at nothing."""
        self.key = secrets.token_bytes(32) if key is None else key
        self.index = PrefixIndex() if index is None else index
        self.chunk_size = MIN_CHUNK
        self.num_by_prefix = self.num_by_load = 0  # prompts that went where most of them is known, or elsewhere
        self._route = route
        self._random = np.random.default_rng(first)
        self._max_num_seqs = max_num_seqs
        self._typical = TypicalRequest()
        self._priced_answer = 0.0
        self._work: dict[str, Work] = {}
        self._costs: list[StepCostTable | None] = [None] * size
        self._num_choices, self._prompt_tokens, self._answer_tokens = np.zeros((3, size), np.int64)
        self._turns = (np.arange(size) - first) % max(size, 1) - size  # when each was chosen last
        self._turn = 0
        self._alive: Sequence[int] = ()  # and the same as an array and as bits
        self._alive_array, self._alive_bits = np.zeros(0, np.int64), 0
        self._set_prices()

    @property
    def loads(self) -> list[float]:
        """Seconds of work that wait or run in each engine."""
        loads: list[float] = self._loads().tolist()
        return loads

    def queued_and_running(self) -> tuple[float, float]:
        """What `wanted_engines` goes by: seconds of work that waits, and shares of running slots that are taken.

        As long as no engine has told what its steps cost, nothing is known to wait.
        """
        waiting = np.maximum(self._num_choices - self._max_num_seqs, 0)
        queued = self._prompt_tokens * self._prompt_price + waiting * self._answer_price * self._typical_answer
        running = np.minimum(self._num_choices / self._max_num_seqs, 1.0)
        return float(queued.sum()) if self._is_priced else 0.0, float(running.sum())

    def seconds_lost_with(self, engine: int) -> float:
        """Of the work that it has, and that others would have to compute what only its cache holds."""
        only_there = self.index.num_chunks_only_in(engine) * self.chunk_size * self._prompt_price[engine]
        return float(self._loads()[engine] + only_there)

    @property
    def uncached_tokens(self) -> list[int]:
        """Tokens of prompts that wait in each engine to be computed, as far as can be told."""
        tokens: list[int] = self._prompt_tokens.tolist()
        return tokens

    def stats(self, alive: Sequence[int], num_placed_again: int = 0, num_deaths: int = 0) -> RoutingStats:
        """How the engines, of which these live, share the requests."""
        return RoutingStats(
            loads=self.loads,
            num_by_prefix=self.num_by_prefix,
            num_by_load=self.num_by_load,
            num_placed_again=num_placed_again,
            num_deaths=num_deaths,
            num_engines=len(alive),
            num_guessed=sum(not self.index.publishes(engine) for engine in alive),
            num_gaps=self.index.num_gaps,
            num_bytes=self.index.num_bytes,
        )

    def describe(self, block_size: int, kv_windows: Sequence[int | None]) -> None:
        """Take in how the engines' KV caches are divided."""
        self.chunk_size = chunk_size(block_size)
        widest = max((window - 1 for window in kv_windows if window is not None), default=0)
        self.index.window_chunks = -(-widest // self.chunk_size)

    def set_costs(self, engine: int, costs: StepCostTable) -> None:
        """The engine says what its steps cost."""
        self._costs[engine] = costs
        if costs.is_known and self._is_priced:
            self._prompt_price[engine], self._answer_price[engine] = self._prices(costs)
        else:
            self._set_prices()

    def apply(self, engine: int, events: KVEvents) -> bool:
        """The engine says what it holds. False if it has to be asked for everything (`PublishKVEvents`)."""
        return self.index.apply(engine, events)

    def choose(
        self,
        request_ids: Sequence[str],
        prompt: Sequence[int],
        alive: Sequence[int],
        *,
        tenant: str = "",
        salt: str = "",
        max_tokens: int | None = None,
    ) -> int:
        """Choose the engine, one of `alive`, for all choices of one prompt: they count as its work until they `ended`.

        `prompt` may be any numbers that tell prompts apart, such as bytes, where no engine publishes.
        """
        count, length = len(request_ids), len(prompt)
        hashes = PrefixHashes(self.key, self.chunk_size, tenant, salt)
        most = (length - 1) // self.chunk_size  # a token is always left to compute
        if alive != self._alive:
            self._alive, self._alive_array = list(alive), np.array(alive)
            self._alive_bits = sum(1 << each for each in alive)
        walked, found = self.index.find(_chunks(hashes, prompt, most), self._alive_bits)
        known = np.zeros_like(self._prompt_tokens)
        for bits, number in found:
            known[_engines(bits)] = number
        chosen = self._pick(known, count, length)
        self._turn += 1
        self._turns[chosen] = self._turn
        num_known = int(known[chosen])
        uncached = length - self.chunk_size * num_known
        guessed = [*walked, *_chunks(hashes, prompt, most)][num_known if self.index.publishes(chosen) else 0 :]
        self.index.guess(chosen, guessed)
        typical = round(self._typical_answer)
        answer = typical if max_tokens is None else min(typical, max_tokens)
        for request_id in request_ids:
            self._work[request_id] = Work(chosen, uncached, answer, length, guessed)
            self._prompt_tokens[chosen] += uncached
            uncached, guessed = 0, []  # the first stands for the prompt, which is computed once for all
        self._num_choices[chosen] += count
        self._answer_tokens[chosen] += answer * count
        return chosen

    def _pick(self, known: NDArray[np.int64], count: int, length: int) -> int:
        engines = self._alive_array
        if self._route == "random":
            return int(self._random.choice(engines))
        if self._route == "round-robin":
            return int(engines[self._turns[engines].argmin()])
        queued = np.maximum(self._num_choices + count - self._max_num_seqs, 0)  # choices that wait for a slot
        seconds = self._loads() + queued * self._answer_price * self._typical_answer
        seconds += PREFILL_WEIGHT * length * self._prompt_price
        # Prices are measured, and may be wrong: nobody waits for one engine while another has slots to spare, but for
        # what is known there.
        has_slots = queued == 0
        if self._route == "prefix":
            seconds -= PREFILL_WEIGHT * self.chunk_size * known * self._prompt_price
            has_slots |= known > 0
        free = has_slots[engines]
        if not free.all() and free.any():
            engines = engines[free]
        costs = seconds[engines]
        least = costs.min()
        ties = engines[costs <= least + 1e-9 * abs(least)]
        chosen = int(ties[self._turns[ties].argmin()] if len(ties) > 1 else ties[0])
        if 0 < known[chosen] == known.max():
            self.num_by_prefix += 1
        else:
            self.num_by_load += 1
        return chosen

    def advanced(self, request_id: str, num_tokens: int) -> None:
        """A choice got so many tokens: its prompt has been computed, and as many fewer are left of its answer."""
        work = self._work.get(request_id)
        if work is not None and num_tokens:
            work.num_output_tokens += num_tokens
            self._leave(work, max(work.answer_tokens - num_tokens, min(work.answer_tokens, 1)))

    def ended(self, request_id: str, *, by_itself: bool) -> None:
        """A choice is no work any more. Those that were not broken off tell how long answers get."""
        work = self._work.pop(request_id, None)
        if work is None:
            return
        self._leave(work, 0)
        self._num_choices[work.engine] -= 1
        if by_itself and work.num_output_tokens:
            self._typical.learn(work.num_prompt_tokens, work.num_output_tokens)
            if abs(self._typical_answer - self._priced_answer) > _STALE * self._priced_answer:
                self._set_prices()

    def forget(self, engine: int) -> None:
        """The engine has gone, and its cache with it."""
        for request_id in [each for each, work in self._work.items() if work.engine == engine]:
            self.ended(request_id, by_itself=False)
        self.index.forget(engine)
        self._costs[engine] = None
        self._set_prices()

    def _leave(self, work: Work, answer_tokens: int) -> None:
        """Nothing of the prompt, and so much of the answer, is left to do."""
        if work.prompt_tokens:
            self._prompt_tokens[work.engine] -= work.prompt_tokens
        if work.guessed:
            if self.index.publishes(work.engine):
                self.index.unguess(work.engine, work.guessed)
            work.guessed = []
        self._answer_tokens[work.engine] -= work.answer_tokens - answer_tokens
        work.prompt_tokens, work.answer_tokens = 0, answer_tokens

    @property
    def _typical_answer(self) -> float:
        return self._typical.num_output_tokens or UNKNOWN_ANSWER

    def _loads(self) -> NDArray[np.float64]:
        loads: NDArray[np.float64] = self._prompt_tokens * self._prompt_price + self._answer_tokens * self._answer_price
        return loads

    def _set_prices(self) -> None:
        """Seconds for a token of a prompt and for one of an answer. An engine that has not told is like another."""
        self._priced_answer = self._typical_answer
        any_costs = next((each for each in self._costs if each is not None and each.is_known), None)
        self._is_priced = any_costs is not None
        other = (1 / TOKENS_PER_ANSWER, 1 / self._typical_answer) if any_costs is None else self._prices(any_costs)
        prices = [self._prices(own) if own is not None and own.is_known else other for own in self._costs]
        self._prompt_price, self._answer_price = np.array(prices).reshape(-1, 2).T

    def _prices(self, costs: StepCostTable) -> tuple[float, float]:
        rows = costs.decode.sizes[-1]
        prices = self._typical.prices(costs, rows)
        return prices.prompt_token, prices.step / rows


def _chunks(hashes: PrefixHashes, prompt: Sequence[int], most: int) -> Iterator[int]:
    """The hashes of a prompt from where they are known on, up to `most`."""
    while len(hashes.hashes) < most:
        yield hashes.extend(prompt)


def _engines(bits: int) -> NDArray[np.int64]:
    octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.unpackbits(octets, bitorder="little").nonzero()[0]


# ----------------------------------------------------------------------------------------------------------- fleet size
# How many engines there should be, by what waits: for the engines of one server, and for Ray Serve's replicas.


MAX_QUEUED_SECONDS = 2.0
RUNNING_SHARE = 0.8  # of all running slots; where more are taken, another engine is wanted before anybody waits
UPSCALE_SECONDS, DOWNSCALE_SECONDS = 5.0, 300.0  # for which more, or fewer, have to be wanted


def wanted_engines(queued_seconds: float, running: float, max_queued_seconds: float = MAX_QUEUED_SECONDS) -> int:
    """As many as it takes for nobody to wait for longer than that. `queued_seconds` and `running`, the share of running
    slots that are taken, are sums over all engines."""
    # Who waits has all slots taken before him, so work that waits comes on top of the work that runs.
    return math.ceil(queued_seconds / max_queued_seconds + running / RUNNING_SHARE)


class FleetSize:
    """How many engines there should be: raised to the fewest that were wanted at any time in the last
    `UPSCALE_SECONDS`, lowered to the most in the last `DOWNSCALE_SECONDS`."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = most
        self._wanted: deque[tuple[float, int]] = deque()  # when, and how many
        self._began: float | None = None

    def update(self, wanted: int, now: float) -> int:
        """How many there should be now. To be asked every second or so."""
        self._began = now if self._began is None else self._began
        self._wanted.append((now, min(max(wanted, self._least), self._most)))
        while self._wanted[0][0] < now - DOWNSCALE_SECONDS:
            self._wanted.popleft()
        if now - self._began >= UPSCALE_SECONDS:
            self.size = max(self.size, min(each for when, each in self._wanted if when >= now - UPSCALE_SECONDS))
        if now - self._began >= DOWNSCALE_SECONDS:
            self.size = min(self.size, max(each for _, each in self._wanted))
        return self.size
