"""The stream of one request's outputs, and the interface to metrics.

1. Deltas that the reader has not read are merged, so a slow reader costs memory for its text and nothing else.
2. Waking a task costs several times as much as the other work for a token. So a reader may set a listener, which is
   called with the outputs of each step; the reader is woken only for outputs that the listener does not take.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

import anyio

from engine.messages import ALL_LOGPROBS, EngineCoreRequest, FinishReason, RequestEvent, RequestOutput, SchedulerStats

Listener = Callable[[Collection[RequestOutput]], bool]
"""Takes the deltas of a stream's choices, at most one per choice. Returns False to leave them to the reader."""

A_VOCABULARY = 2**20  # tokens: no model has more
FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT)


class RequestStream:
    """The deltas of one request, all its choices together; iterate it from one task.

    A request has `n` choices for each of its prompts, numbered prompt by prompt. Iteration ends after the last choice
    has finished, or raises the error that ended the engine.
    """

    def __init__(
        self, requests: Sequence[EngineCoreRequest], children: Sequence[EngineCoreRequest], opened_time: float
    ) -> None:
        self.request_id = requests[0].request_id
        self.sampling = requests[0].sampling
        self.prompts = [request.prompt_token_ids for request in requests]
        self.prompt_lengths = [len(prompt) for prompt in self.prompts]
        self.num_prompt_tokens = sum(self.prompt_lengths)
        self.child_ids = [child.request_id for child in children]
        self.arrival_time = requests[0].arrival_time
        self.opened_time = opened_time
        self.events: list[tuple[int, RequestEvent]] = []  # events in the engine, with the number of the choice
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.num_output_tokens = 0
        self.longest_output = 0  # tokens of the longest choice that has ended
        self.num_cached_tokens = 0  # prompt tokens from the prefix cache, counted once for each prompt
        self.logprobs_per_token = max(_num_logprobs(request) for request in requests)
        self.num_unfinished = len(children)
        self.finished_time: float | None = None  # when the last choice ended in the engine
        self.finish_reason: FinishReason | None = None  # of the choice that finished last, or of one that failed
        self.was_refused = False  # the client caused the error of a choice
        self.leave_reason = FinishReason.ABORT  # reported if the caller leaves before the end
        self.error: Exception | None = None  # the error that ended the engine
        self.on_begin: Callable[[], None] | None = None  # called at the first output of each choice
        self.on_end: Callable[[int], None] | None = None  # called at the end of each choice, with its number of tokens
        self.abort: Callable[[RequestStream], None] = lambda stream: (
            None
        )  # ends a stream early, for its reader to answer
        self.unenforced: tuple[str, ...] = ()  # keywords of the request's JSON Schemas that no grammar enforces
        self._pending: dict[int, RequestOutput] = {}
        self._arrived: anyio.Event | None = None
        self._waits_for_end = False  # the reader waits for the end
        self._listener: Listener | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        await self.wait()
        if self._pending:
            return self._pending.pop(next(iter(self._pending)))
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def durations(self) -> tuple[float, float, float]:
        """Return the seconds before the engine began, of prefill, and of decode; up to now if it has not ended."""
        end = time.monotonic() if self.finished_time is None else self.finished_time
        begin = end if self.first_scheduled_time is None else self.first_scheduled_time
        first = end if self.first_token_time is None else self.first_token_time
        return begin - self.arrival_time, first - begin, end - first

    @property
    def is_drained(self) -> bool:
        """True if everything has been read and nothing more will come."""
        return not self._pending and not self.num_unfinished and self.error is None

    async def wait(self) -> None:
        """Wait until there is something to read, or nothing more will come. May be cancelled without loss."""
        while not self._pending and self.error is None and self.num_unfinished:
            self._arrived = anyio.Event()
            await self._arrived.wait()

    async def wait_finished(self) -> None:
        """Wait until nothing more will come, or a choice has failed. Deltas are merged into one per choice."""
        self._waits_for_end = True
        try:
            while self.error is None and not self._is_over:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        finally:
            self._waits_for_end = False

    def listen(self, listener: Listener | None) -> None:
        """Set the listener for the outputs of steps. If it returns False, they stay pending and the reader is
        woken. It is called while the reader's task waits, and must not raise."""
        self._listener = listener

    def drain(self) -> list[RequestOutput]:
        """Return everything that is pending, without waiting: one merged delta per choice."""
        pending, self._pending = list(self._pending.values()), {}
        return pending

    def push(self, output: RequestOutput) -> None:
        pending = self._pending.get(output.index)
        if pending is None:
            self._pending[output.index] = output
        else:
            _merge(pending, output)

    @property
    def num_pending_logprobs(self) -> int:
        """The number of log-probabilities that wait to be read."""
        return self.logprobs_per_token * sum(
            len(output.token_ids) + len(output.prompt_logprobs or ()) for output in self._pending.values()
        )

    def hand_over(self, *, listened: bool = True) -> None:
        """Give all pushed outputs to the listener. If there is none, or `listened` is False, wake the reader.

        The reader is woken for text or an end, and not for a token without text yet, such as the first half of a
        character.
        """
        if not self._pending:
            return
        outputs = self._pending.values()
        if listened and self._listener is not None and self._listener(outputs):
            self._pending.clear()
        elif self._arrived is not None and (
            self._is_over
            if self._waits_for_end
            else any(output.text or output.finish_reason is not None for output in outputs)
        ):
            self._wake()

    @property
    def _is_over(self) -> bool:
        return not self.num_unfinished or self.finish_reason in FAILURES

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Pending outputs can still be read."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None


def _num_logprobs(request: EngineCoreRequest) -> int:
    sampling = request.sampling
    asked = [each for each in (sampling.logprobs, sampling.prompt_logprobs) if each is not None]
    if ALL_LOGPROBS in asked:
        return A_VOCABULARY
    if asked:
        asked.append(len(sampling.logprob_token_ids))
    return max(asked) + 1 if asked else 0


def _merge(pending: RequestOutput, output: RequestOutput) -> None:
    """Add a later delta of the same choice to one that has not been read yet."""
    pending.text += output.text
    pending.token_ids += output.token_ids
    if output.logprobs is not None:
        pending.logprobs = (pending.logprobs or []) + output.logprobs
    pending.finish_reason = output.finish_reason
    pending.stop_reason = output.stop_reason
    pending.num_cached_tokens = output.num_cached_tokens
    pending.num_output_tokens = output.num_output_tokens
    pending.error = output.error
    pending.embedding = output.embedding
    pending.refusal = output.refusal
    pending.rank_lost = output.rank_lost


# ------------------------------------------------------------------------------------------------------------- observer
# The interface to the application's metrics. Tests have other observers.


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """The figures of a request that has ended. Tokens are those of its usage. None: the phase was not reached."""

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    longest_output: int  # tokens of the longest choice
    cached_tokens: int
    e2e_seconds: float  # arrival to end
    queue_seconds: float | None  # arrival to first schedule
    prefill_seconds: float | None  # first schedule to first token
    decode_seconds: float | None  # first token to end
    num_choices: int = 1  # of each prompt
    max_tokens: int | None = None  # as the request sets it
    num_preemptions: int = 0  # of all choices


class Observer:
    """Ignores all figures; subclasses count them.

    Called on the front end's thread. Methods are fast and never raise. Times are in seconds.
    """

    def on_step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        """Count a step, with the scheduler's stats and the number of new tokens of open requests."""

    def on_prompt(self, tokens: int) -> None:
        """Count the prompts of a request, once: at its first token, or at its end if it got none."""

    def on_first_token(self, seconds: float) -> None:
        """Count the first token of a choice, this long after the request's arrival."""

    def on_inter_token(self, seconds: float, count: int) -> None:
        """Count further tokens of a step, each `seconds` after the token before it in its choice."""

    def on_request_finished(self, finished: FinishedRequest) -> None:
        """Count a request that has ended, once."""

    def on_delivery(self, seconds: float) -> None:
        """Count a delivery of events, which took this much processor time of the thread."""
