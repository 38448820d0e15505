"""The input batch: what the device side remembers of every request between steps, and a step's inputs made from it.

Owned by the model runner and used by its thread alone. A request has one row from the plan that brings it to the plan
that removes it, so a step costs only its diffs; all else is gathers over whole columns, never a loop over requests.
The arrays are allocated for the largest batch and the longest context at once, and since they start as zero pages the
operating system commits only the parts that are touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData, SchedulerOutput
from gpu.sampling import SamplingState


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The inputs of one step, on the host. B requests, T tokens in all, S rows that sample.

    The requests stand in device order: those with one token first, as `AttentionMetadata` wants them, otherwise as in
    the plan. `order[i]` is the index in the plan of the request at place i.
    """

    order: NDArray[np.int64]  # [B]
    rows: NDArray[np.int64]  # [B], into the input batch
    num_decodes: int  # how many requests have exactly one token in this step
    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T], block id * block_size + offset
    query_start_loc: NDArray[np.int32]  # [B + 1]
    query_lens: NDArray[np.int32]  # [B]
    seq_lens: NDArray[np.int32]  # [B], all tokens up to the last one of this step
    block_table: NDArray[np.int32]  # [B, blocks of the longest request]
    samples: NDArray[np.int64]  # [S], the places that sample
    logits_indices: NDArray[np.int64]  # [S], their last tokens among the T


class InputBatch:
    """Persistent rows of tokens, block tables and sampling parameters. Not thread-safe.

    A row takes one token more than `max_model_len`: the last sample of a request that fills its context is recorded
    too, though it is never computed.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.sampling = SamplingState(max_num_seqs)
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-(max_model_len + 1) // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # a stack: low rows first keeps touched memory small

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def token_ids(self, request_id: str) -> list[int]:
        """Prompt and output of one request, as known here."""
        row = self._row_of[request_id]
        return self._token_ids[row, : self._num_tokens[row]].tolist()

    def num_computed_tokens(self, request_id: str) -> int:
        """How many of its tokens have their KV in the cache."""
        return int(self._num_computed_tokens[self._row_of[request_id]])

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's diffs: first the removals, then the new requests, then blocks for the known ones.

        Removing what is not here is a no-op, because the plan that brought it may have failed before it got a row.
        Raises KeyError for blocks of an unknown request, ValueError for a new one that is known already or does not
        fit: mistakes of the scheduler, never of a client.
        """
        for request_id in plan.removed_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            self._add(request)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._row_of[request_id], block_ids)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """The inputs of a step whose diffs have been applied and that schedules at least one request."""
        plan_rows = np.array([self._row_of[request_id] for request_id in plan.request_ids], dtype=np.int64)
        scheduled = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        decodes = scheduled == 1
        order = np.argsort(~decodes, kind="stable")
        rows, query_lens = plan_rows[order], scheduled[order]

        first_positions = self._num_computed_tokens[rows]
        seq_lens = first_positions + query_lens
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])

        # Token t of request i stands at position first_positions[i] + (t - query_start_loc[i]).
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(first_positions - query_start_loc[:-1], query_lens)
        blocks = self._block_table[token_rows, positions // self.block_size].astype(np.int64)
        samples = np.flatnonzero(np.array(plan.num_sampled_tokens)[order])
        return StepInputs(
            order=order,
            rows=rows,
            num_decodes=int(decodes.sum()),
            input_ids=self._token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=query_start_loc,
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=self._block_table[rows, : -(-int(seq_lens.max()) // self.block_size)],
            samples=samples,
            logits_indices=query_start_loc[1:][samples].astype(np.int64) - 1,
        )

    def num_tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """How many tokens these rows hold: the position of the next one."""
        return self._num_tokens[rows]

    def advance(self, inputs: StepInputs, sampled_token_ids: NDArray[np.int64]) -> None:
        """Record a step that has run. `sampled_token_ids` is [S], parallel to `inputs.samples`."""
        self._num_computed_tokens[inputs.rows] = inputs.seq_lens
        rows = inputs.rows[inputs.samples]
        self._token_ids[rows, self._num_tokens[rows]] = sampled_token_ids
        self._num_tokens[rows] += 1
        self.sampling.append(rows, sampled_token_ids)

    def _remove(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self.sampling.remove(row)
            self._free_rows.append(row)

    def _add(self, request: NewRequestData) -> None:
        if request.request_id in self._row_of:
            raise ValueError(f"Request {request.request_id} is in the batch already.")
        num_tokens = len(request.token_ids)
        if num_tokens >= self._token_ids.shape[1]:
            limit = self._token_ids.shape[1] - 1
            raise ValueError(f"Request {request.request_id} has {num_tokens} tokens; a row holds at most {limit}.")
        if not self._free_rows:
            raise ValueError(f"Request {request.request_id} finds all {self.max_num_seqs} rows of the batch taken.")
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self._token_ids[row, :num_tokens] = request.token_ids
        self._num_tokens[row] = num_tokens
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        self.sampling.add(row, request)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self._num_blocks[row]
        self._block_table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
