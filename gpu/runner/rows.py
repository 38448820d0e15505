"""The row table: the state of every request between a runner's steps, and the shape of a step over these rows.

A request has one row from the plan that adds it to the plan that removes it, so a step costs only its diffs; the rest
is gathers over whole columns, never a loop over requests. The number of a row's tokens does not depend on their values,
so the table is the same for a runner that waits for tokens and one that does not. The tokens themselves and the block
tables are in the runner's `RowStore`. Only the runner's thread uses the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from gpu.sampling.columns import SAMPLING_COLUMNS, Column, make_columns
from gpu.sampling.logits import Biases
from gpu.sampling.sampler import NamedTokens

COLUMNS = (
    *SAMPLING_COLUMNS,
    Column("num_prompt_tokens", np.int32, 0, attrgetter("num_prompt_tokens")),
    Column("num_tokens", np.int32, 0, lambda request: len(request.token_ids)),
    Column("num_computed_tokens", np.int32, 0, attrgetter("num_computed_tokens")),
)


class BatchSizes(NamedTuple):
    """The sizes of a batch."""

    max_num_seqs: int
    max_model_len: int  # tokens of the longest context
    block_size: int
    num_groups: int = 1  # groups of layers, each with a block table (`engine.plan`)
    has_states: bool = False  # some layers have a state for each request

    @property
    def row_len(self) -> int:
        """Tokens of a row, one more than `max_model_len`: the last sample of a request that fills its context is
        recorded too, though it is never computed."""
        return self.max_model_len + 1

    @property
    def row_blocks(self) -> int:
        """Blocks of a row, for `row_len` tokens."""
        return -(-self.row_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step as the host knows it: B requests, T tokens in all, S positions at which a token is sampled.

    The requests are in device order: those with one token first, as `AttentionMetadata` requires, otherwise as in the
    plan. The sampled positions of a request are its last ones in the step, one or several.
    """

    order: NDArray[np.int64]  # [B], the index in the plan of the request at each place
    rows: NDArray[np.int64]  # [B]
    query_lens: NDArray[np.int32]  # [B]
    seq_lens: NDArray[np.int32]  # [B], all tokens up to the last one of this step
    query_start_loc: NDArray[np.int32]  # [B + 1]
    num_decodes: int  # the number of requests with exactly one token
    samples: NDArray[np.int64]  # [S], indices into the requests, ascending: each once per sampled position
    logits_indices: NDArray[np.int64]  # [S], the sampled positions among the T tokens
    positions: NDArray[np.int64]  # [S], positions of the tokens to sample, from the start of their prompts

    @property
    def sampling_rows(self) -> NDArray[np.int64]:
        return self.rows[self.samples]

    @property
    def is_decode(self) -> bool:
        """True if every request has one token and samples the next."""
        return self.num_decodes == len(self.rows) == len(self.samples)

    def output(
        self,
        token_ids: NDArray[np.int64],
        finite: NDArray[np.bool_],
        logprobs: dict[int, TokenLogprobs],
        states_finite: NDArray[np.bool_] | None = None,
    ) -> ModelRunnerOutput:
        """Return the sampled tokens in the order of the plan. The arrays are [S]; `logprobs` is by index into them.

        `states_finite`, [T], is False for tokens with a state that is not finite; None where all tokens are sampled
        from. Attention can spread NaN to earlier tokens (a weight of 0 times NaN), so no block that such a step
        computed for the request may be shared.
        """
        plan_indices = self.order[self.samples]
        sampled: list[list[int]] = [[] for _ in range(len(self.order))]
        for index, token_id in zip(plan_indices.tolist(), token_ids.tolist(), strict=True):
            sampled[index].append(token_id)
        entries: dict[int, list[TokenLogprobs]] = {}
        for sample, entry in logprobs.items():
            entries.setdefault(int(plan_indices[sample]), []).append(entry)
        not_finite: list[int] = plan_indices[~finite].tolist()
        if states_finite is not None:
            suspect = self.order[~np.logical_and.reduceat(states_finite, self.query_start_loc[:-1])]
            not_finite = sorted({*not_finite, *suspect.tolist()})
        return ModelRunnerOutput(sampled_token_ids=sampled, logprobs=entries, not_finite=not_finite)


class RowStore(Protocol):
    """The tokens and block tables of the rows, in the runner's memory."""

    def add(self, row: int, request: NewRequestData) -> None:
        """Store a new request's tokens. Its columns are already filled; its blocks come by `append_blocks`."""

    def append_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        """Store blocks from index `start` on of the tables of all groups: for each index, one block of every group."""

    def remove(self, row: int) -> None: ...


class RowTable:
    """The columns of all requests. A request's row never moves. Not thread-safe."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.columns = make_columns(COLUMNS, sizes.max_num_seqs)
        self.biases = Biases(self.columns)
        self.named_tokens = NamedTokens()
        self._sizes = sizes
        self._fills = [(self.columns[column.name], column.fill) for column in COLUMNS]
        self._num_tokens = self.columns["num_tokens"]
        self._num_computed_tokens = self.columns["num_computed_tokens"]
        self._num_blocks = [0] * sizes.max_num_seqs
        self._rows: dict[str, int] = {}
        self._broken: set[str] = set()  # requests of plans with partly applied diffs, until their removal
        self._free_rows = list(reversed(range(sizes.max_num_seqs)))  # low rows first, so that less memory is touched

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, request_id: str) -> int:
        """Return the row of a request. Raises KeyError for an unknown one."""
        return self._rows[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def apply(self, plan: SchedulerOutput, store: RowStore) -> None:
        """Apply a plan's diffs: first the removals, then the new requests, then blocks for the known ones.

        Removing an unknown request is a no-op, because the plan that brought it may have failed before it got a row.
        Raises KeyError for blocks of an unknown request, ValueError for a new one that is known already or does not
        fit: errors of the scheduler, never of a client.
        """
        for request_id in plan.removed_request_ids:
            self._remove(request_id, store)
        if not self._broken.isdisjoint(plan.request_ids):
            raise ValueError("The plan contains requests with earlier diffs that were not applied.")
        try:
            for request in plan.new_requests:
                self._add(request, store)
            for request_id, block_ids in plan.new_block_ids.items():
                self._append_blocks(self._rows[request_id], block_ids, store)
        except BaseException:
            # A plan on top of this one would compute with blocks that were never added.
            self._broken.update(plan.request_ids)
            raise

    def shape(self, plan: SchedulerOutput) -> StepShape:
        """Return the shape of a plan's step. Its diffs have been applied, and it schedules at least one request."""
        plan_rows = np.array([self._rows[request_id] for request_id in plan.request_ids], dtype=np.int64)
        scheduled = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        order = np.argsort(scheduled != 1, kind="stable")
        rows, query_lens = plan_rows[order], scheduled[order]
        seq_lens = self._num_computed_tokens[rows] + query_lens
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])

        num_sampled = np.array(plan.num_sampled_tokens, dtype=np.int64)[order]
        samples = np.repeat(np.arange(len(rows)), num_sampled)
        # The number of tokens from each sampled position to the end of its request's: ..., 2, 1.
        left = np.ones(len(samples), dtype=np.int64)
        if max(plan.num_sampled_tokens) > 1:
            left = np.cumsum(num_sampled)[samples] - np.arange(len(samples))
        return StepShape(
            order=order,
            rows=rows,
            query_lens=query_lens,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            num_decodes=plan.num_scheduled_tokens.count(1),
            samples=samples,
            logits_indices=query_start_loc[1:][samples] - left,
            positions=seq_lens[samples] - left + 1,
        )

    def advance(self, shape: StepShape) -> None:
        """Advance the counts by a step: all its tokens are computed, and the sampled ones follow them."""
        self._num_computed_tokens[shape.rows] = shape.seq_lens
        self._num_tokens[shape.sampling_rows] = shape.positions + 1

    def _remove(self, request_id: str, store: RowStore) -> None:
        self._broken.discard(request_id)
        row = self._rows.get(request_id)
        if row is not None:
            # These calls may be repeated: if one fails, the row stays known, and the next plan removes it.
            self.biases.remove(row)
            self.named_tokens.remove(row)
            store.remove(row)
            del self._rows[request_id]
            self._free_rows.append(row)

    def _add(self, request: NewRequestData, store: RowStore) -> None:
        if request.request_id in self._rows:
            raise ValueError(f"Request {request.request_id} is in the batch already.")
        num_tokens, limit, num_rows = len(request.token_ids), self._sizes.max_model_len, self._sizes.max_num_seqs
        if num_tokens > limit:
            raise ValueError(f"Request {request.request_id} has {num_tokens} tokens; a row holds at most {limit}.")
        if not self._free_rows:
            raise ValueError(f"Request {request.request_id} finds all {num_rows} rows of the batch taken.")
        row = self._rows[request.request_id] = self._free_rows.pop()
        for numbers, fill in self._fills:
            numbers[row] = fill(request)
        self._num_blocks[row] = 0
        self.biases.add(row, request)
        self.named_tokens.add(row, request)
        store.add(row, request)
        self._append_blocks(row, request.block_ids, store)

    def _append_blocks(self, row: int, block_ids: list[int], store: RowStore) -> None:
        start = self._num_blocks[row]
        store.append_blocks(row, start, block_ids)
        self._num_blocks[row] = start + len(block_ids) // self._sizes.num_groups
