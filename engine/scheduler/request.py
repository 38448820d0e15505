"""A request as the scheduler sees it: its tokens, how far they are computed, and the blocks it owns.

Owned by the scheduler alone, on the engine's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import InitVar, dataclass, field

import msgspec

from engine.kv_events import PrefixHashes
from engine.messages import (
    BATCH_PRECEDENCE,
    EngineCoreRequest,
    EventKind,
    FinishReason,
    Pooling,
    RequestEvent,
    SamplingParams,
    TokenLogprobs,
)
from engine.plan import NO_BLOCK, NO_CHECKPOINT, NewRequestData
from engine.snapshot import RequestSnapshot, WaitsFor
from engine.structured.matchers import TokenMatcher


class RequestStatus(enum.IntEnum):
    """The states of a request: WAITING → RUNNING → FINISHED_*, with RUNNING → PREEMPTED → RUNNING in between.
    Terminal states sort last.
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6
    FINISHED_EXPIRED = 7


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_EXPIRED: FinishReason.TIMEOUT,
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The live state of one request. Two counters describe its progress: `num_computed_tokens` catches up with
    `num_tokens`.

    `token_ids` is the prompt followed by the output. `block_ids` is the block table (`engine.plan`) with room for
    `room` tokens: place i holds the keys and values of tokens [i * block_size, (i + 1) * block_size). `block_hashes[i]`
    identifies these tokens and everything before them; it is filled lazily, for full blocks only.
    """

    message: EngineCoreRequest  # without the prompt
    sequence_number: int  # order of arrival at the core; breaks ties
    eos_token_ids: Collection[int]
    max_model_len: InitVar[int]
    grammar: TokenMatcher | None = None
    request_id: str = field(init=False)
    tenant: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    generates: bool = field(init=False)  # False if the request wants only results of its prompt
    is_batch: bool = field(init=False)  # a row of a batch that has not been released
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | None = None
    is_complete: bool = False  # the grammar is complete: no token may follow
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    room: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    prefix_hashes: PrefixHashes | None = None  # of the chunks that KV events have reported
    num_committed_blocks: int = 0
    num_cached_tokens: int = 0
    wakes_at: int = 0  # number of the plan in which it wakes (`SteadyRequests`); 0 unless steady
    num_overtaken: int = 0  # how often a shorter request of its tenant took a running slot before it
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # positions with log-probabilities that have been sent
    events: list[RequestEvent] = field(default_factory=list)  # not yet reported
    asked_tiers: bool = False  # the tiers have been searched for the blocks beyond its cached prefix
    load: Load | None = None  # the load it waits for
    # Of a model with states (`engine.scheduler.checkpoints`):
    checkpoint: int = NO_CHECKPOINT  # from which it starts or resumes
    branch: int = 0  # number of tokens in cached blocks when it was admitted
    latest_checkpoint: bytes | None = None  # within its answer; the next one replaces it
    ends: frozenset[int] = field(init=False)

    def __post_init__(self, max_model_len: int) -> None:
        message, sampling = self.message, self.message.sampling
        self.message = msgspec.structs.replace(message, prompt_token_ids=[])
        self.request_id, self.tenant, self.sampling = message.request_id, message.tenant, sampling
        self.token_ids = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        most = max_model_len if sampling.max_tokens is None else self.num_prompt_tokens + sampling.max_tokens
        self.max_num_tokens = min(most, max_model_len)
        self.generates = sampling.max_tokens != 0
        self.is_batch = message.precedence == BATCH_PRECEDENCE
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else self.eos_token_ids)
        self.ends = self.eos_token_ids.union(sampling.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """True if blocks that other requests computed can be used. They have keys and values, but no hidden states."""
        needs_all = self.sampling.prompt_logprobs is not None or self.message.pooling in (Pooling.MEAN, Pooling.TOKENS)
        return not needs_all or self.num_output_tokens > 0

    @property
    def is_steady(self) -> bool:
        """True if the request decodes without a grammar, and only its latest token has yet to be computed."""
        computed = self.num_computed_tokens
        return computed + 1 == len(self.token_ids) and computed >= self.num_prompt_tokens and self.grammar is None

    def may_decode_ahead(self, num_planned_tokens: int) -> bool:
        """Return True if the next token can be computed while the latest one is still being sampled; up to
        `num_planned_tokens` are computed then.

        False if the latest token may reach the token limit, or if a grammar must read it to know which tokens may
        follow. (Other ends are found later, and delay no other request.)
        """
        return num_planned_tokens + 1 < self.max_num_tokens and self.grammar is None

    def num_to_sample(self, num_planned_tokens: int, most: int) -> int:
        """Return how many tokens, at most `most`, a decode may sample when up to `num_planned_tokens` have been
        computed.

        It is at most the remaining token limit, and 1 if a grammar must read each token, or if no token is there yet to
        draft from.
        """
        if self.grammar is not None or num_planned_tokens < self.num_prompt_tokens:
            return 1
        return min(most, self.max_num_tokens - num_planned_tokens - 1)

    def is_late(self, now: float) -> bool:
        """Return True if a deadline that still counts has passed."""
        last, first_token = self.message.deadline, self.message.first_token_deadline
        if last is not None and now >= last:
            return True
        return first_token is not None and now >= first_token and self.num_output_tokens == 0

    def note(self, kind: EventKind, time: float, tokens: int) -> None:
        self.events.append(RequestEvent(kind, time, tokens))

    def take_events(self) -> list[RequestEvent]:
        """Return the events that have not been reported yet."""
        events, self.events = self.events, []
        return events

    def append_output_tokens(self, token_ids: list[int]) -> bool:
        """Add sampled tokens, up to the one that ends the request; tokens behind it are removed from the list.

        Returns True if one ended the request, with `status` and `stop_reason` set.
        """
        if not self.generates:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        known, before = self.token_ids, len(self.token_ids)
        for token_id in token_ids:
            known.append(token_id)
            if self.grammar is None and token_id not in self.ends and len(known) < self.max_num_tokens:
                continue  # the usual case
            if self._is_ended_by(token_id):
                del token_ids[len(known) - before :]
                return True
        return False

    def _is_ended_by(self, token_id: int) -> bool:
        """Return True if this newest output token ends the request."""
        is_completed = False
        if self.grammar is not None:
            is_completed = self.grammar.accept(token_id)
            if self.grammar.error is not None:
                self.status = RequestStatus.FINISHED_ERROR
                return True
            self.grammar = self.grammar.rest
        if token_id in self.ends and self.num_output_tokens >= self.sampling.min_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            if token_id not in self.eos_token_ids:
                self.stop_reason = token_id
            return True
        if is_completed:
            self.status = RequestStatus.FINISHED_STOPPED
            self.is_complete = True
            return True
        if len(self.token_ids) >= self.max_num_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def take_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return those of `entries` that were not sent before. `entries` are for the positions from `start` + 1 on;
        after a preemption some of them are computed a second time.
        """
        new = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(new)
        return new

    def to_new_request(self) -> NewRequestData:
        """Return what a runner needs of a request that it does not know yet."""
        return NewRequestData(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=list(self.block_ids),
            sampling=self.sampling,
            stop_token_ids=sorted(self.ends),
            pooling=self.message.pooling,
            checkpoint=self.checkpoint,
            second_segment=self.message.second_segment,
            num_unpooled=self.message.num_unpooled,
        )

    def snapshot(self, waits_for: WaitsFor | None = None) -> RequestSnapshot:
        return RequestSnapshot(
            request_id=self.request_id,
            tenant=self.tenant,
            status=self.status.name.lower(),
            priority=self.message.priority,
            arrival_time=self.message.arrival_time,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
            num_blocks=len(self.block_ids) - self.block_ids.count(NO_BLOCK),
            num_preemptions=self.num_preemptions,
            waits_for=waits_for,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{self.num_tokens}, {len(self.block_ids)} blocks)"
        )


@dataclass(slots=True)
class Load:
    """Chunks that are being loaded from tiers into blocks.

    `sources` has, for each chunk, the tier it came from; None until it arrives; "" if it cannot be loaded.
    """

    contents: list[bytes]
    block_ids: list[int]  # NO_BLOCK where the next token does not see it
    prefix: list[int]  # the preceding blocks, referenced so that they are not evicted during the load
    sources: list[str | None]
    requests: list[Request]
    news: float  # when the load began, or its latest chunk arrived
    ticket: int = 0
