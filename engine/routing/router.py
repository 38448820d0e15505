"""The choice of an engine for a request by expected work, and the number of engines.

A request goes to the engine that is expected to finish it first, after its other work and the uncached part of the
prompt. So an engine with the prefix of a prompt gets it, until the wait there is longer than the prefill that it saves.
Then another engine computes the prefix too, so a popular prefix soon is in as many caches as necessary.
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

# The assumed length of an answer before the first has ended, and the assumed number of prompt tokens that cost as much
# as one answer before an engine has reported what its steps cost.
UNKNOWN_ANSWER = 256
TOKENS_PER_ANSWER = 512
# The weight of uncached prompt tokens: computing them delays all requests of the engine and evicts other prefixes.
PREFILL_WEIGHT = 3.0
_STALE = 0.05  # relative change of the typical length of answers that makes prices stale
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # the ends of answers that count for the typical length


class Work(msgspec.Struct, gc=False):
    """The expected remaining work of a choice, in tokens."""

    engine: int
    prompt_tokens: int  # not expected in the cache
    answer_tokens: int
    num_prompt_tokens: int
    guessed: list[int]  # chunks of the prompt that are assumed to be in the cache until it is computed
    num_output_tokens: int = 0


class Router:
    """The loads and the cached prefixes of engines 0 .. `size` - 1.

    A load is the work that was sent to an engine and is not finished. The engine's own reports would be older, and
    would lack work that is under way. Work is in seconds, by the engine's step costs in full batches.
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
        """Make a router for engines of `max_num_seqs` running slots.

        `key` is the key of the hashes that the engines publish. `first` is the engine that wins the first tie; several
        routers of the same engines should use different values. Route `load` ignores prefixes, `round-robin` and
        `random` ignore loads too."""
        self.key = secrets.token_bytes(32) if key is None else key
        self.index = PrefixIndex() if index is None else index
        self.chunk_size = MIN_CHUNK
        self.num_by_prefix = self.num_by_load = 0  # prompts sent to the engine with most of the prefix, and to others
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
        self._alive: Sequence[int] = ()  # below: the same as an array and as bits
        self._alive_array, self._alive_bits = np.zeros(0, np.int64), 0
        self._set_prices()

    @property
    def loads(self) -> list[float]:
        """The seconds of work that wait or run in each engine."""
        loads: list[float] = self._loads().tolist()
        return loads

    def queued_and_running(self) -> tuple[float, float]:
        """Return the arguments of `wanted_engines`: the seconds of waiting work, and the share of running slots in use,
        both summed over engines. The seconds are 0 until an engine has reported its step costs."""
        waiting = np.maximum(self._num_choices - self._max_num_seqs, 0)
        queued = self._prompt_tokens * self._prompt_price + waiting * self._answer_price * self._typical_answer
        running = np.minimum(self._num_choices / self._max_num_seqs, 1.0)
        return float(queued.sum()) if self._is_priced else 0.0, float(running.sum())

    def seconds_lost_with(self, engine: int) -> float:
        """Return the seconds lost by ending this engine: its open work, and prefills of chunks that only it holds."""
        only_there = self.index.num_chunks_only_in(engine) * self.chunk_size * self._prompt_price[engine]
        return float(self._loads()[engine] + only_there)

    @property
    def uncached_tokens(self) -> list[int]:
        """The expected number of prompt tokens that each engine still has to compute."""
        tokens: list[int] = self._prompt_tokens.tolist()
        return tokens

    def stats(self, alive: Sequence[int], num_placed_again: int = 0, num_deaths: int = 0) -> RoutingStats:
        """Return the state of the routing; `alive` are the engines that live."""
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
        """Set the block size and the windows of the engines' KV caches."""
        self.chunk_size = chunk_size(block_size)
        widest = max((window - 1 for window in kv_windows if window is not None), default=0)
        self.index.window_chunks = -(-widest // self.chunk_size)

    def set_costs(self, engine: int, costs: StepCostTable) -> None:
        self._costs[engine] = costs
        if costs.is_known and self._is_priced:
            self._prompt_price[engine], self._answer_price[engine] = self._prices(costs)
        else:
            self._set_prices()

    def apply(self, engine: int, events: KVEvents) -> bool:
        """Apply KV events. Return False if the engine has to be asked for everything (`PublishKVEvents`)."""
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
        """Choose one of `alive` for all choices of one prompt. They count as its work until `ended`.

        If no engine publishes KV events, `prompt` may have any numbers that distinguish prompts, such as bytes.
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
            uncached, guessed = 0, []  # the first choice counts for the prompt, which is computed once for all
        self._num_choices[chosen] += count
        self._answer_tokens[chosen] += answer * count
        return chosen

    def _pick(self, known: NDArray[np.int64], count: int, length: int) -> int:
        engines = self._alive_array
        if self._route == "random":
            return int(self._random.choice(engines))
        if self._route == "round-robin":
            return int(engines[self._turns[engines].argmin()])
        queued = np.maximum(self._num_choices + count - self._max_num_seqs, 0)  # choices waiting for a slot
        seconds = self._loads() + queued * self._answer_price * self._typical_answer
        seconds += PREFILL_WEIGHT * length * self._prompt_price
        # Measured prices may be wrong. So no request waits for an engine while another has free slots, except for its
        # cached prefix.
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
        """Count new tokens of a choice: its prompt has been computed, and less of its answer is left."""
        work = self._work.get(request_id)
        if work is not None and num_tokens:
            work.num_output_tokens += num_tokens
            self._leave(work, max(work.answer_tokens - num_tokens, min(work.answer_tokens, 1)))

    def ended(self, request_id: str, *, by_itself: bool) -> None:
        """Remove the work of a choice. Choices that ended by themselves count for the typical length of answers."""
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
        """Remove an ended engine's work, costs and cached prefixes."""
        for request_id in [each for each, work in self._work.items() if work.engine == engine]:
            self.ended(request_id, by_itself=False)
        self.index.forget(engine)
        self._costs[engine] = None
        self._set_prices()

    def _leave(self, work: Work, answer_tokens: int) -> None:
        """Count the prompt as computed, and set the remaining answer to `answer_tokens`."""
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
        """Set the seconds per prompt token and per answer token. An engine without reported costs gets another's."""
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
    """Yield further hashes of a prompt, up to `most` in all."""
    while len(hashes.hashes) < most:
        yield hashes.extend(prompt)


def _engines(bits: int) -> NDArray[np.int64]:
    octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.unpackbits(octets, bitorder="little").nonzero()[0]


# ----------------------------------------------------------------------------------------------------------- fleet size
# The number of engines by waiting work, for the engines of one server and for Ray Serve's replicas.


MAX_QUEUED_SECONDS = 2.0
RUNNING_SHARE = 0.8  # share of all running slots; if more are in use, another engine is wanted before requests wait
UPSCALE_SECONDS, DOWNSCALE_SECONDS = 5.0, 300.0  # how long more, or fewer, engines must be wanted


def wanted_engines(queued_seconds: float, running: float, max_queued_seconds: float = MAX_QUEUED_SECONDS) -> int:
    """Return the number of engines with which no request waits for longer than `max_queued_seconds`. `queued_seconds`
    and `running`, the share of running slots that are taken, are sums over all engines."""
    # Requests wait only if all slots are taken, so waiting work is added to running work.
    return math.ceil(queued_seconds / max_queued_seconds + running / RUNNING_SHARE)


class FleetSize:
    """The number of engines. It rises to the smallest number wanted in the last `UPSCALE_SECONDS`, and falls to the
    largest number wanted in the last `DOWNSCALE_SECONDS`."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = most
        self._wanted: deque[tuple[float, int]] = deque()  # times and numbers
        self._began: float | None = None

    def update(self, wanted: int, now: float) -> int:
        """Return the number of engines for now. Call it about once a second."""
        self._began = now if self._began is None else self._began
        self._wanted.append((now, min(max(wanted, self._least), self._most)))
        while self._wanted[0][0] < now - DOWNSCALE_SECONDS:
            self._wanted.popleft()
        if now - self._began >= UPSCALE_SECONDS:
            self.size = max(self.size, min(each for when, each in self._wanted if when >= now - UPSCALE_SECONDS))
        if now - self._began >= DOWNSCALE_SECONDS:
            self.size = min(self.size, max(each for _, each in self._wanted))
        return self.size
