"""The model runner: the `Runner` that keeps the batch on the host, gathers a step's inputs and waits for its tokens.

Made by the worker and used by its thread alone. It owns the row table and the input batch; model and KV caches are
handed in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.scheduler.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from gpu.input_batch import InputBatch
from gpu.prompt_outputs import PromptOutputs
from gpu.rows import BatchSizes, RowTable, StepShape
from gpu.runner import FinishedStep, LanguageModel, PicksTokens, cancellation_check
from gpu.sampling import SamplerOutput, SamplingMetadata, logits_mask, sample

# Rows of logits that a CPU takes on at a time. 256 rows of 49,152 float32 are 50 MB, which malloc maps anew in every
# step: the page faults alone took three times as long as the matrix product. 64 rows stay in memory that it keeps.
CPU_LOGITS_ROWS = 64


class ModelRunner:
    """A `gpu.runner.Runner` whose steps have run when `submit` returns."""

    def __init__(
        self, model: LanguageModel, kv_caches: list[torch.Tensor], sizes: BatchSizes, device: torch.device
    ) -> None:
        self.rows = RowTable(sizes)
        self.input_batch = InputBatch(self.rows, sizes, device)
        self._model = model
        self._picks_tokens = model if isinstance(model, PicksTokens) else None
        self._kv_caches = kv_caches
        self._max_logits_rows = CPU_LOGITS_ROWS if device.type == "cpu" else sizes.max_num_seqs
        self._prompt_outputs = PromptOutputs(model.compute_logits, self._max_logits_rows)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> FinishedStep:
        return FinishedStep(self._execute(plan, abandoned))

    def prepare(self) -> bool:
        return False

    @torch.inference_mode()
    def _execute(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None) -> ModelRunnerOutput:
        self.rows.apply(plan, self.input_batch)
        self._prompt_outputs.apply(plan)
        if not plan.request_ids:
            return ModelRunnerOutput(sampled_token_ids=[], logprobs={})
        shape = self.rows.shape(plan)
        inputs = self.input_batch.inputs(shape)
        hidden = self._model.forward(*inputs, self._kv_caches, cancellation_check(abandoned))
        sampled = self._sample(hidden, shape, None if plan.masks is None else plan.masks.result())
        self.input_batch.append(shape, sampled.token_ids)
        self.rows.advance(shape)
        output = shape.output(sampled.token_ids, sampled.finite, sampled.logprobs)
        self._prompt_outputs.add_to(output, plan, shape, hidden)
        return output

    def _sample(self, hidden: torch.Tensor, shape: StepShape, masks: TokenMasks | None) -> SamplerOutput:
        """The tokens of the sampled positions; logits are computed of no others."""
        starts = range(0, len(shape.samples), self._max_logits_rows)
        parts = [
            self._sample_part(hidden, shape, masks, slice(start, start + self._max_logits_rows)) for start in starts
        ]
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
        self, hidden: torch.Tensor, shape: StepShape, masks: TokenMasks | None, part: slice
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
        sampled = hidden[self.input_batch.to_device(shape.logits_indices[part])]
        if self._picks_tokens is not None and metadata.is_plain_greedy:
            token_ids, finite = self._picks_tokens.most_likely(sampled)
            return SamplerOutput(token_ids=token_ids, finite=finite, logprobs={})
        output = sample(self._model.compute_logits(sampled), metadata)
        for place, entry in output.logprobs.items():
            if entry.every is not None:
                output.logprobs[place] = self.rows.named_tokens.told(int(rows[place]), entry)
        return output
