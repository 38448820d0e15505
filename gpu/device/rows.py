"""What the host knows of the rows on the device: everything but the tokens of the steps in flight. Used by the runner.

How many tokens a row holds does not depend on which they are, so lengths, and who samples, are known ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.plan import NewRequestData, SchedulerOutput
from gpu.device.tables import DeviceTables
from gpu.device.upload import Upload
from gpu.sampling import SamplingState

_FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step as the host sees it: B requests in device order, those with one token first, S of them sampling."""

    order: NDArray[np.int64]  # [B], the index in the plan of the request at each place
    rows: NDArray[np.int64]  # [B]
    query_lens: NDArray[np.int32]  # [B]
    seq_lens: NDArray[np.int32]  # [B], all tokens up to the last one of this step
    query_start_loc: NDArray[np.int32]  # [B + 1]
    num_decodes: int  # how many have exactly one token
    samples: NDArray[np.int64]  # [S], places
    num_tokens: NDArray[np.int32]  # [S], held by the rows that sample: the position of the token to be drawn

    @property
    def sampling_rows(self) -> NDArray[np.int64]:
        return self.rows[self.samples]

    @property
    def is_decode(self) -> bool:
        """Whether everybody has one token and samples the next."""
        return self.num_decodes == len(self.rows) == len(self.samples)


class Rows:
    """A request has one row from the plan that brings it to the plan that removes it. Not thread-safe."""

    def __init__(self, tables: DeviceTables, max_num_seqs: int) -> None:
        self.sampling = SamplingState(max_num_seqs)
        self.is_penalized = np.zeros(max_num_seqs, dtype=bool)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._tables = tables
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._sent_rows = np.empty(0, dtype=np.int32)  # how the step's rows stand on the device

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, request_id: str) -> int:
        return self._row_of[request_id]

    def apply(self, plan: SchedulerOutput, upload: Upload) -> None:
        """Take in a plan's diffs, as `gpu.input_batch.InputBatch.apply` does, and pass on what the device must know."""
        for request_id in plan.removed_request_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self.sampling.remove(row)
                self._free_rows.append(row)
        for request in plan.new_requests:
            self._add(request, upload)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._row_of[request_id], block_ids, upload)

    def shape(self, plan: SchedulerOutput) -> StepShape:
        """The step of a plan whose diffs have been applied, and that schedules at least one request."""
        plan_rows = np.array([self._row_of[request_id] for request_id in plan.request_ids], dtype=np.int64)
        scheduled = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        order = np.argsort(scheduled != 1, kind="stable")
        rows, query_lens = plan_rows[order], scheduled[order]
        seq_lens = self._num_computed_tokens[rows] + query_lens
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        samples = np.flatnonzero(np.array(plan.num_sampled_tokens)[order])
        return StepShape(
            order=order,
            rows=rows,
            query_lens=query_lens,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            num_decodes=int((scheduled == 1).sum()),
            samples=samples,
            num_tokens=self._num_tokens[rows[samples]],
        )

    def send_shape(self, shape: StepShape, padded_to: int, upload: Upload) -> None:
        """Tell the device who is in the step. In a step of decodes that are those of the step before, nothing is sent;
        then the rows are padded, and the device needs no more than them."""
        rows = np.full(max(padded_to, len(shape.rows)), self._tables.padding_row, dtype=np.int32)
        rows[: len(shape.rows)] = shape.rows
        if not np.array_equal(rows, self._sent_rows[: len(rows)]):
            upload.write(self._tables.offset("batch_rows"), rows.tolist())
            self._sent_rows = rows
        if not padded_to:
            upload.write(self._tables.offset("query_lens"), shape.query_lens.tolist())
            upload.write(self._tables.offset("samples"), shape.samples.tolist())

    def advance(self, shape: StepShape) -> None:
        """Count what a step that has been started will have done."""
        self._num_computed_tokens[shape.rows] = shape.seq_lens
        self._num_tokens[shape.sampling_rows] += 1

    def forget_sent(self) -> None:
        """Nobody knows what a step that failed has left on the device."""
        self._sent_rows = np.empty(0, dtype=np.int32)

    def _add(self, request: NewRequestData, upload: Upload) -> None:
        if request.request_id in self._row_of:
            raise ValueError(f"Request {request.request_id} is in the batch already.")
        num_tokens = len(request.token_ids)
        if num_tokens >= self._tables.max_len:
            limit = self._tables.max_len - 1
            raise ValueError(f"Request {request.request_id} has {num_tokens} tokens; a row holds at most {limit}.")
        if not self._free_rows:
            raise ValueError(f"Request {request.request_id} finds all rows of the batch taken.")
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self._num_tokens[row] = num_tokens
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._num_blocks[row] = 0
        self._add_parameters(row, request, upload)
        upload.write(self._tables.offset("token_ids", row), request.token_ids)
        upload.write(self._tables.offset("num_prompt_tokens", row), [request.num_prompt_tokens])
        upload.write(self._tables.offset("num_tokens", row), [num_tokens])
        upload.write(self._tables.offset("num_computed_tokens", row), [request.num_computed_tokens])
        self._append_blocks(row, request.block_ids, upload)

    def _add_parameters(self, row: int, request: NewRequestData, upload: Upload) -> None:
        self.sampling.add(row, request)
        params = request.sampling
        self.is_penalized[row] = params.has_penalties
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        columns = self.sampling.columns(row)
        for name in _FLOATS:
            upload.write(self._tables.offset(name, row), words_of(np.array([columns[name]], dtype=np.float32)))
        upload.write(self._tables.offset("top_k", row), [int(columns["top_k"])])
        upload.write(self._tables.offset("seed", row), words_of(np.array([columns["seed"]], dtype=np.uint64)))
        for name, value in (
            ("repetition", params.repetition_penalty),
            ("presence", params.presence_penalty),
            ("frequency", params.frequency_penalty),
        ):
            upload.write(self._tables.offset(name, row), words_of(np.array([value], dtype=np.float32)))

    def _append_blocks(self, row: int, block_ids: list[int], upload: Upload) -> None:
        start = self._num_blocks[row]
        upload.write(self._tables.offset("block_table", row, start), block_ids)
        self._num_blocks[row] = start + len(block_ids)


def words_of(array: NDArray[Any]) -> list[int]:
    """Numbers as the signed 32-bit words that they are in memory."""
    words: list[int] = array.view(np.int32).tolist()
    return words
