"""Loads of a simulation (`engine.simulation.simulation.Workload`): the requests and their times."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.config.settings import Settings
from app.workload.datasets import Piece, WorkloadRequest
from app.workload.report import RequestRecord
from engine.messages import EngineCoreRequest, SamplingParams
from engine.simulation.counting import VOCAB_SIZE
from engine.simulation.simulation import SimulatedRequest

MAX_OPEN, MAX_OPEN_TOKENS = 10_000, 2**21  # unfinished requests, and tokens of their prompts: some 100 MB

Spread = Literal["fixed", "uniform", "exponential"]


def draw_length(mean: float, spread: Spread, share: float) -> int:
    """Return the length in tokens, at least 1, at this quantile (`share`) of the distribution."""
    if spread == "fixed" or mean <= 1:
        return max(1, round(mean))
    if spread == "uniform":
        return 1 + int(share * (2 * mean - 1))
    return 1 + int(math.log1p(-share) / math.log1p(-1 / mean))  # geometric


class LoadShape(BaseModel):
    """The parameters of an open load. Lengths are means in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rate: float = Field(default=3.0, ge=0.01, le=1000)  # requests per second
    burstiness: float = Field(default=1.0, ge=0.05, le=100)  # 1: Poisson; lower: bursts; higher: even gaps
    input_len: float = Field(default=64, ge=1, le=8192)
    output_len: float = Field(default=32, ge=1, le=4096)
    length_spread: Spread = "exponential"
    shared_prefix_len: int = Field(default=0, ge=0, le=8192)  # tokens that all prompts begin with, before `input_len`


class OpenLoad:
    """Requests that come at a rate, independent of the answers. The shape may change at any time.

    Each request uses the same random numbers at any rate and length, so that two simulations differ only by the change.
    """

    def __init__(self, shape: Callable[[], LoadShape], longest: int, seed: int) -> None:
        """Cut lengths so that prompt and answer have at most `longest` tokens together."""
        self._shape = shape
        self._longest = longest
        self._gaps, self._lengths = Random(f"{seed} gaps"), Random(f"{seed} lengths")
        self._since = 0.0  # the time from which `_gap` counts
        self._gap = self._draw_gap()  # until the next request, in mean gaps
        self._number = 0
        self._num_open = 0
        self.open_tokens = 0  # of the prompts of unfinished requests
        self._next_token_id = 2**20  # lower ids belong to the shared prefix

    def _draw_gap(self) -> float:
        burstiness = self._shape().burstiness
        return self._gaps.gammavariate(burstiness, 1 / burstiness)

    @property
    def due(self) -> float:
        return self._since + self._gap / self._shape().rate

    def change(self, now: float, change: Callable[[], None]) -> None:
        """Change the shape at this time. The rest of the current gap is stretched to the new rate."""
        self._gap -= (now - self._since) * self._shape().rate
        self._since = now
        change()

    def take(self) -> EngineCoreRequest:
        """Return the next request. Raises ValueError if too many requests are unfinished to be kept in memory."""
        if self._num_open >= MAX_OPEN or self.open_tokens >= MAX_OPEN_TOKENS:
            raise ValueError(
                f"rate: {self._num_open} requests with {self.open_tokens} prompt tokens are unfinished; allowed: up to "
                f"{MAX_OPEN} and {MAX_OPEN_TOKENS}. Start a new simulation at a lower rate"
            )
        shape = self._shape()
        self._since = self.due
        self._gap = self._draw_gap()
        num_inputs = draw_length(shape.input_len, shape.length_spread, self._lengths.random())
        num_outputs = draw_length(shape.output_len, shape.length_spread, self._lengths.random())
        num_shared = min(shape.shared_prefix_len, self._longest // 4)
        num_outputs = min(num_outputs, self._longest // 2)
        num_inputs = min(num_inputs, self._longest - num_shared - num_outputs)
        first = self._next_token_id
        answer = first + num_inputs
        self._next_token_id = (answer + num_outputs) % 2**31
        self._number += 1
        self._num_open += 1
        self.open_tokens += num_shared + num_inputs
        return EngineCoreRequest(
            request_id=f"request-{self._number}",
            prompt_token_ids=[*range(num_shared), *range(first, answer)],
            sampling=SamplingParams(temperature=0.0, max_tokens=num_outputs, seed=answer),
            arrival_time=self._since,
        )

    def ended(self, request: SimulatedRequest) -> None:
        self._num_open -= 1
        self.open_tokens -= request.num_prompt_tokens


class WorkloadLoad:
    """The requests of a workload, sent as `app.bench` sends them: at their time, or when a slot is free if concurrency
    is limited, and in a conversation after the previous answer. `records` has what the clients saw."""

    def __init__(
        self, requests: Sequence[WorkloadRequest], *, max_concurrency: int | None = None, settings: Settings
    ) -> None:
        self.records = [RequestRecord(0.0, request_id=str(number)) for number in range(len(requests))]
        self._requests = requests
        self._settings = settings
        self._free = max_concurrency or len(requests)
        self._lengths: dict[str, int] = {}
        for key, length in (piece for request in requests for piece in request.pieces):
            self._lengths[key] = max(length, self._lengths.get(key, 0))
        self._numbers: dict[str, int] = {}  # the first token of each piece
        self._next_token_id = 0
        self._said: dict[int, list[int]] = {}  # the history of each conversation
        self._later: defaultdict[int, deque[int]] = defaultdict(deque)  # turns of each conversation still to be sent
        self._line: list[tuple[float, int]] = []
        for number, request in enumerate(requests):
            if request.arrival is not None:
                heappush(self._line, (request.arrival, number))
            if request.conversation is not None:
                self._later[request.conversation].append(number)

    @property
    def due(self) -> float:
        return self._line[0][0] if self._free and self._line else math.inf

    def take(self) -> EngineCoreRequest:
        time, number = heappop(self._line)
        self._free -= 1
        request, record = self._requests[number], self.records[number]
        record.scheduled_time = time
        prompt = [token for piece in request.pieces for token in self._tokens_of(piece)]
        if request.conversation is not None:
            prompt = self._said.pop(request.conversation, []) + prompt
            self._later[request.conversation].popleft()
        answer = self._take_numbers(request.num_output_tokens * request.n)
        if request.conversation is not None and self._later[request.conversation]:
            self._said[request.conversation] = [*prompt, *answer[: request.num_output_tokens]]
        timeouts = (self._settings.default_timeout, self._settings.default_ttft_timeout)
        deadline, first_token_deadline = (None if each is None else time + each for each in timeouts)
        return EngineCoreRequest(
            request_id=record.request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=request.num_output_tokens, seed=answer.start, n=request.n
            ),
            arrival_time=time,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
        )

    def _tokens_of(self, piece: Piece) -> range:
        first = self._numbers.get(piece.key)
        if first is None:
            first = self._numbers[piece.key] = self._take_numbers(self._lengths[piece.key]).start
        return range(first, first + piece.num_tokens)

    def _take_numbers(self, count: int) -> range:
        if self._next_token_id + count > VOCAB_SIZE:
            self._next_token_id = 0  # their last use was 4 * 10^9 tokens ago
        self._next_token_id += count
        return range(self._next_token_id - count, self._next_token_id)

    def ended(self, request: SimulatedRequest) -> None:
        number = int(request.request_id)
        record = self.records[number]
        record.start_time, record.end_time = request.start_time, request.end_time or request.start_time
        record.token_times, record.token_choices = request.token_times, request.token_choices
        if record.token_choices:  # steps that were made as one have the tokens of each choice together
            pairs = sorted(zip(record.token_times, record.token_choices, strict=True))
            record.token_times, record.token_choices = map(list, zip(*pairs, strict=True))
        record.num_prompt_tokens = request.num_prompt_tokens
        record.num_output_tokens = len(request.token_times)
        record.num_cached_tokens = request.num_cached_tokens
        record.error, record.status = request.error or "", 429 if request.is_refused else 200
        self._free += 1
        conversation = self._requests[number].conversation
        if conversation is None or not self._later[conversation]:
            return
        if record.error:
            for later in self._later.pop(conversation):
                self.records[later].mark_unsent(record.end_time)
            return
        following = self._later[conversation][0]
        heappush(self._line, (record.end_time + self._requests[following].think_time, following))
