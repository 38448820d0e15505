"""The model runner: one plan in, one token for every request that is due one out.

Owned by the worker and used by its thread alone. It owns the input batch; model, KV caches and attention are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import StepAbandoned
from engine.scheduler.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from gpu.attention import AttentionMetadata
from gpu.input_batch import InputBatch, StepInputs
from gpu.prompt_outputs import PromptOutputs
from gpu.sampling import SamplerOutput, logits_mask, sample

# Rows of logits that a CPU takes on at a time. 256 rows of 49,152 float32 are 50 MB, which malloc maps anew in every
# step: the page faults alone took three times as long as the matrix product. 64 rows stay in memory that it keeps.
CPU_LOGITS_ROWS = 64


class LanguageModel(Protocol):
    """What the runner needs of a model. T tokens, R rows."""

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [T]
        positions: torch.Tensor,  # int64 [T]
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The last hidden states, [T, hidden].

        Calls `cancellation_check` between layers; what it raises ends the pass.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab], in any float dtype."""
        ...


@runtime_checkable
class PicksTokens(Protocol):
    """A model that finds the token of the largest logit faster than it computes all logits."""

    def most_likely(self, hidden: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[R, hidden] -> int64 [R], the lowest of several; and bool [R], False where logits are not finite."""
        ...


class ModelRunner:
    """Runs plans in the order given. Not thread-safe."""

    def __init__(
        self,
        model: LanguageModel,
        kv_caches: list[torch.Tensor],
        *,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self.input_batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
        self._model = model
        self._kv_caches = kv_caches
        self._device = device
        self._max_logits_rows = CPU_LOGITS_ROWS if device.type == "cpu" else max_num_seqs
        self._prompt_outputs = PromptOutputs(model.compute_logits, self._max_logits_rows)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> ModelRunnerOutput:
        """Run one step. A plan may hold nothing but diffs; then nothing runs and the output is empty.

        If the forward pass raises, the diffs have been applied but no request has advanced. It raises StepAbandoned
        between two layers if `abandoned` says that nobody wants the step any more.
        """
        self.input_batch.apply(plan)
        self._prompt_outputs.apply(plan)
        if not plan.request_ids:
            return ModelRunnerOutput(sampled_token_ids=[], logprobs={})
        inputs = self.input_batch.prepare(plan)
        hidden = self._model.forward(
            self._to_device(inputs.input_ids),
            self._to_device(inputs.positions),
            self._attention_metadata(inputs),
            self._kv_caches,
            None if abandoned is None else partial(stop_if, abandoned),
        )
        sampled = self._sample(hidden, inputs, None if plan.masks is None else plan.masks.result())
        self.input_batch.advance(inputs, sampled.token_ids)
        output = _in_plan_order(inputs, sampled)
        self._prompt_outputs.add_to(output, plan, inputs, hidden)
        return output

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs, masks: TokenMasks | None) -> SamplerOutput:
        """The tokens of the rows that are due one; logits are computed for no others."""
        num_rows = len(inputs.samples)
        parts = [
            self._sample_part(hidden, inputs, masks, slice(start, start + self._max_logits_rows))
            for start in range(0, num_rows, self._max_logits_rows)
        ]
        if len(parts) == 1:
            return parts[0]
        starts = range(0, num_rows, self._max_logits_rows)
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
        self, hidden: torch.Tensor, inputs: StepInputs, masks: TokenMasks | None, part: slice
    ) -> SamplerOutput:
        places = inputs.samples[part]
        rows = inputs.rows[places]
        metadata = self.input_batch.sampling.select(rows, self.input_batch.num_tokens_of(rows))
        if masks is not None:
            metadata = replace(metadata, mask=logits_mask(masks, inputs.order[places]))
        sampled = hidden[self._to_device(inputs.logits_indices[part])]
        if metadata.is_plain_greedy and isinstance(self._model, PicksTokens):
            token_ids, finite = self._model.most_likely(sampled)
            return SamplerOutput(token_ids=token_ids, finite=finite, logprobs={})
        return sample(self._model.compute_logits(sampled), metadata)

    def _attention_metadata(self, inputs: StepInputs) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=self._to_device(inputs.query_start_loc),
            seq_lens=self._to_device(inputs.seq_lens),
            block_table=self._to_device(inputs.block_table),
            slot_mapping=self._to_device(inputs.slot_mapping),
            num_decodes=inputs.num_decodes,
            query_lens_list=inputs.query_lens.tolist(),
            seq_lens_list=inputs.seq_lens.tolist(),
        )

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _in_plan_order(inputs: StepInputs, sampled: SamplerOutput) -> ModelRunnerOutput:
    plan_indices = inputs.order[inputs.samples]
    token_ids: list[list[int]] = [[] for _ in range(len(inputs.order))]
    for index, token_id in zip(plan_indices.tolist(), sampled.token_ids.tolist(), strict=True):
        token_ids[index].append(token_id)
    logprobs = {int(plan_indices[i]): [entry] for i, entry in sampled.logprobs.items()}
    not_finite: list[int] = plan_indices[~sampled.finite].tolist()
    return ModelRunnerOutput(sampled_token_ids=token_ids, logprobs=logprobs, not_finite=not_finite)


def stop_if(abandoned: Callable[[], bool]) -> None:
    """The cancellation_check of a step that can be broken off."""
    if abandoned():
        raise StepAbandoned("every request of this step has been aborted")
