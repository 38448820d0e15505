"""The runner that keeps its batch on the host and waits for its tokens. The worker makes it; only its thread uses
it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.plan import NO_CHECKPOINT, ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenMasks
from gpu.runner.prompt_outputs import PromptOutputs
from gpu.runner.rows import BatchSizes, RowTable, StepShape
from gpu.runner.runner import (
    NO_LINKS,
    FinishedStep,
    LanguageModel,
    ModelInputs,
    StageLinks,
    StateInputs,
    cancellation_check,
)
from gpu.sampling.draw import Shards
from gpu.sampling.logits import Penalized, logits_mask
from gpu.sampling.sampler import SamplerOutput, SamplingMetadata, sample, token_logprobs

# Rows of logits computed at a time. 256 rows of 49,152 float32 are 50 MB, which malloc maps anew in every step: the
# page faults alone took three times as long as the matrix product. 64 rows stay in memory that malloc keeps.
MAX_LOGITS_ROWS = 64


class ModelRunner:
    """A `gpu.runner.runner.Runner` that has run a step when `submit` returns."""

    def __init__(
        self, model: LanguageModel, sizes: BatchSizes, links: StageLinks = NO_LINKS, shards: Shards | None = None
    ) -> None:
        """Make a runner of a model, or with `links` of one stage: only the last stage samples, and `record` gives its
        tokens to the others. With `shards`, it samples together with other ranks."""
        self.rows = RowTable(sizes)
        self.input_batch = InputBatch(self.rows, sizes)
        self._model = model
        self._prompt_outputs = PromptOutputs(MAX_LOGITS_ROWS)
        self._has_states = sizes.has_states
        self._links = links
        self._shards = shards
        self._unsampled: deque[tuple[list[str], StepShape]] = deque()  # steps with tokens that are not known here yet

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> FinishedStep:
        return FinishedStep(self._execute(plan, abandoned))

    def prepare(self) -> bool:
        return False

    def record(self, sampled_token_ids: list[list[int]] | None) -> None:
        """Record the last stage's tokens of the oldest step that lacks them, in the order of its plan; None if that
        stage abandoned the step. Tokens of removed requests are dropped."""
        request_ids, shape = self._unsampled.popleft()
        if sampled_token_ids is None:
            return
        plan_indices = shape.order[shape.samples]
        in_order = [iter(tokens) for tokens in sampled_token_ids]
        token_ids = np.array([next(in_order[index]) for index in plan_indices.tolist()], dtype=np.int64)
        here = np.array([request_ids[index] in self.rows for index in plan_indices.tolist()], dtype=bool)
        self.input_batch.record(shape.sampling_rows[here], shape.positions[here], token_ids[here])

    def swap_model(self, model: LanguageModel) -> LanguageModel:
        """Compute with this model from now on; return the one before."""
        model, self._model = self._model, model
        return model

    def _execute(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None) -> ModelRunnerOutput:
        for request_id in plan.removed_request_ids:
            for request_ids, _ in self._unsampled:
                if request_id in request_ids:
                    request_ids[request_ids.index(request_id)] = ""
        self.rows.apply(plan, self.input_batch)
        self._prompt_outputs.apply(plan)
        if not plan.request_ids:
            return ModelRunnerOutput(sampled_token_ids=[], logprobs={})
        shape = self.rows.shape(plan)
        inputs = self.input_batch.inputs(shape)
        if self._has_states:
            inputs = inputs._replace(states=self.input_batch.states(shape, plan))
        if self._links.receive is not None:
            inputs = inputs._replace(hidden=self._links.receive(len(inputs.input_ids)))
        hidden = self._model.forward(inputs, cancellation_check(abandoned))
        if self._links.send is not None:
            self._links.send(hidden)
            self.rows.advance(shape)
            self._unsampled.append((list(plan.request_ids), shape))
            return ModelRunnerOutput(sampled_token_ids=[[] for _ in plan.request_ids], logprobs={})
        sampled = self._sample(hidden, shape, None if plan.masks is None else plan.masks.result())
        self.input_batch.record(shape.sampling_rows, shape.positions, sampled.token_ids)
        self.rows.advance(shape)
        states_finite = None if shape.is_decode else _finite(hidden)
        output = shape.output(sampled.token_ids, sampled.finite, sampled.logprobs, states_finite)
        self._prompt_outputs.add_to(output, plan, shape, _HostHiddenStates(self._model, hidden))
        return output

    def _sample(self, hidden: NDArray[np.float32], shape: StepShape, masks: TokenMasks | None) -> SamplerOutput:
        """Compute logits and sample tokens for the sampled positions only."""
        starts = range(0, len(shape.samples), MAX_LOGITS_ROWS)
        parts = [self._sample_part(hidden, shape, masks, slice(start, start + MAX_LOGITS_ROWS)) for start in starts]
        if len(parts) == 1:
            return parts[0]
        return SamplerOutput(
            token_ids=np.concatenate([np.empty(0, np.int64), *(part.token_ids for part in parts)]),
            finite=np.concatenate([np.empty(0, np.bool_), *(part.finite for part in parts)]),
            logprobs={
                start + row: entry
                for start, part in zip(starts, parts, strict=True)
                for row, entry in part.logprobs.items()
            },
        )

    def _sample_part(
        self, hidden: NDArray[np.float32], shape: StepShape, masks: TokenMasks | None, part: slice
    ) -> SamplerOutput:
        places, positions = shape.samples[part], shape.positions[part]
        rows = shape.rows[places]
        metadata = SamplingMetadata(
            columns=self.rows.columns,
            rows=rows,
            positions=positions,
            mask=None if masks is None else logits_mask(masks, shape.order[places]),
            bias=self.rows.biases.select(rows, positions),
            penalties=self.input_batch.penalized.select(rows),
        )
        sampled = hidden[shape.logits_indices[part]]
        if metadata.is_plain_greedy:
            token_ids, finite = self._model.most_likely(sampled)
            return SamplerOutput(token_ids=token_ids, finite=finite, logprobs={})
        compute_logits = self._model.compute_logits if self._shards is None else self._shards.own_logits
        output = sample(compute_logits(sampled), metadata, self._model.draw, self._shards)
        for place, entry in output.logprobs.items():
            if entry.every is not None:
                output.logprobs[place] = self.rows.named_tokens.answer(int(rows[place]), entry)
        return output


def _finite(hidden: NDArray[np.float32]) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.isfinite(hidden.sum(axis=1))


@dataclass(frozen=True)
class _HostHiddenStates:
    """Implements `gpu.runner.prompt_outputs.HiddenStates` for a model on the host."""

    model: LanguageModel
    hidden: NDArray[np.float32]  # [T, hidden]

    def rows(self, part: slice) -> NDArray[np.float32]:
        return self.hidden[part]

    def logprobs(self, part: slice, token_ids: NDArray[np.int64], num_logprobs: int) -> list[TokenLogprobs]:
        logits = self.model.compute_logits(self.hidden[part])
        return token_logprobs(logits, token_ids, np.full(len(token_ids), num_logprobs))


# ---------------------------------------------------------------------------------------------------------- input batch
# The arrays are allocated for the largest batch and the longest context at once. They start as zero pages, so the
# operating system commits only the parts that are touched.


class InputBatch:
    """A `RowStore` on the host: tokens and blocks of all rows, and the inputs of a step. Not thread-safe."""

    def __init__(self, table: RowTable, sizes: BatchSizes) -> None:
        self.block_size = sizes.block_size
        self.penalized = Penalized(table.columns)
        self._num_computed_tokens = table.columns["num_computed_tokens"]
        self._num_prompt_tokens = table.columns["num_prompt_tokens"]
        self.token_ids = np.zeros((sizes.max_num_seqs, sizes.row_len), dtype=np.int32)  # prompt and output
        self._states_from: dict[
            int, int
        ] = {}  # rows of requests that have not run yet, and the checkpoints they begin from
        self.block_tables = np.zeros((sizes.num_groups, sizes.max_num_seqs, sizes.row_blocks), dtype=np.int32)

    def add(self, row: int, request: NewRequestData) -> None:
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.penalized.add(row, request)
        self._states_from[row] = request.checkpoint

    def append_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        num_groups = len(self.block_tables)
        for group, table in enumerate(self.block_tables):
            of_group = block_ids[group::num_groups]
            table[row, start : start + len(of_group)] = of_group

    def remove(self, row: int) -> None:
        self.penalized.remove(row)
        self._states_from.pop(row, None)

    def inputs(self, shape: StepShape) -> ModelInputs:
        # Token t of request i has position first_positions[i] + (t - query_start_loc[i]).
        token_rows = np.repeat(shape.rows, shape.query_lens)
        positions = np.arange(shape.query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(self._num_computed_tokens[shape.rows] - shape.query_start_loc[:-1], shape.query_lens)
        num_blocks = -(-int(shape.seq_lens.max()) // self.block_size)
        return ModelInputs(
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            query_start_loc=shape.query_start_loc,
            seq_lens=shape.seq_lens,
            block_tables=np.ascontiguousarray(self.block_tables[:, shape.rows, :num_blocks]),
            num_decodes=shape.num_decodes,
            num_prompt_tokens=self._num_prompt_tokens[shape.rows],
        )

    def states(self, shape: StepShape, plan: SchedulerOutput) -> StateInputs:
        """Return the state slots of a step. Rows that are new since the last call begin in this step."""
        first = len(self.token_ids)  # the first slot of checkpoints, after those of the rows
        begins = [(row, -1 if kept == NO_CHECKPOINT else first + kept) for row, kept in self._states_from.items()]
        self._states_from.clear()
        saves: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(shape.order.tolist() if plan.checkpoints else ()):
            computed = int(shape.seq_lens[place] - shape.query_lens[place])
            if kept := plan.checkpoints.get(plan.request_ids[index]):
                saves[place] = [(position - computed, first + slot) for position, slot in kept]
        return StateInputs(shape.rows, begins, saves)

    def record(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Store sampled tokens at these positions of their rows, all int64 [S]."""
        self.token_ids[rows, positions] = token_ids
        self.penalized.append(rows, token_ids)
