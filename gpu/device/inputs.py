"""The inputs of a step and its sampling, on the device.

No function waits for the device, except for `DeviceHiddenStates`, and no shape depends on device memory's contents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.plan import MasksHandle, SchedulerOutput, TokenMasks
from gpu.attention import AttentionMetadata
from gpu.device.tables import PENALIZED_TOGETHER, DeviceTables, on_device
from gpu.kernels import (
    LogprobTensors,
    add_bias,
    apply_bitmask,
    apply_penalties,
    compute_logprobs,
    gather_rows,
    sample_tokens,
    step_inputs,
)
from gpu.runner.rows import RowTable, StepShape
from gpu.sampling.columns import EVERY
from gpu.sampling.logits import SparseBias, logits_mask


class DeviceInputs(NamedTuple):
    """The first arguments of `gpu.models.CausalLM.forward`: T tokens, one request after the other."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: list[AttentionMetadata]  # for each KV group


class Samples(NamedTuple):
    """The S positions at which tokens are drawn."""

    rows: torch.Tensor  # int64 [S]
    positions: torch.Tensor  # int64 [S], positions of the tokens to draw, from the start of their prompts
    logits_indices: torch.Tensor | None  # int64 [S], into the step's tokens; None where all are sampled, in order


def model_inputs(
    tables: DeviceTables,
    num_requests: int,
    num_tokens: int,
    shape: StepShape | None = None,
    *,
    all_decode: bool = False,
) -> DeviceInputs:
    """Return the inputs of the step in the tables. Requests and tokens beyond the step's own are padding.

    In a graph `shape` is None, because only the device knows the step. With `all_decode` every request has one token
    and samples the next.
    """
    input_ids, positions, slots, block_tables = step_inputs(tables, num_requests, num_tokens, all_decode=all_decode)
    query_lens = [1] * num_requests if all_decode else [] if shape is None else shape.query_lens.tolist()
    metadata = AttentionMetadata.of_groups(
        query_start_loc=(tables.one_each if all_decode else tables.query_start_loc)[: num_requests + 1],
        seq_lens=tables.seq_lens[:num_requests],
        block_tables=block_tables,
        slot_mappings=slots,
        num_decodes=query_lens.count(1),
        query_lens_list=query_lens,
        seq_lens_list=[] if shape is None else shape.seq_lens.tolist(),
    )
    return DeviceInputs(input_ids, positions, metadata)


def samples_of(tables: DeviceTables, num_samples: int, *, all_decode: bool) -> Samples:
    """Return the positions that the step samples. Call after `model_inputs`, which may write them."""
    indices = None if all_decode else tables.logits_indices[:num_samples]
    return Samples(tables.sampling_rows[:num_samples], tables.sampled_positions[:num_samples], indices)


# ------------------------------------------------------------------------------------------------------------- sampling
# The order of operations is that of `gpu.sampling.sampler`; `gpu.kernels.sample` defines what a seed means. Most steps
# are plain: nothing changes the logits and no request asks for log-probabilities. Those are sampled within a graph; for
# the others the host looks up the features of each row, and the same kernels are started one by one.


@dataclass(frozen=True, kw_only=True)
class SamplingFeatures:
    """The features beyond a plain draw at the sampled positions of a step. Places are indices into these positions."""

    bias: SparseBias | None  # from logit_bias, and for stop tokens before min_tokens
    penalized: NDArray[np.int64]  # places
    masks: MasksHandle | None  # grammar masks, awaited after the forward pass was started
    plan_indices: NDArray[np.int64]  # each place's index in the plan, by which masks are found
    asking: NDArray[np.int64]  # places that want log-probabilities
    num_logprobs: NDArray[np.int64]  # for each of `asking`, the number of most likely tokens; 0 for `EVERY`
    asking_all: NDArray[np.int64]  # indices into `asking`: places that want those of every token
    of_grammar: NDArray[np.int64]  # indices into `asking`: places that want those after the grammar's mask

    @property
    def are_none(self) -> bool:
        return self.bias is None and self.masks is None and not len(self.penalized) and not len(self.asking)


class DeviceSampler:
    """Computes logits and draws from them."""

    def __init__(
        self, tables: DeviceTables, table: RowTable, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._tables = tables
        self._table = table
        self._compute_logits = compute_logits

    def features(self, plan: SchedulerOutput, shape: StepShape) -> SamplingFeatures:
        rows = shape.sampling_rows
        num_logprobs = self._table.columns["num_logprobs"][rows]
        asking = np.flatnonzero(num_logprobs >= 0)
        return SamplingFeatures(
            bias=self._table.biases.select(rows, shape.positions),
            penalized=np.flatnonzero(self._table.columns["is_penalized"][rows]),
            masks=plan.masks,
            plan_indices=shape.order[shape.samples],
            asking=asking,
            num_logprobs=np.where(num_logprobs == EVERY, 0, num_logprobs)[asking],
            asking_all=np.flatnonzero(num_logprobs[asking] == EVERY),
            of_grammar=np.flatnonzero(self._table.columns["of_grammar"][rows][asking]),
        )

    def sample_plainly(self, hidden: torch.Tensor, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample rows without features from [T, hidden]: int64 [S] and bool [S], as `gpu.kernels.sample_tokens` returns
        them. It can be captured in a graph."""
        return self._draw(self._logits(hidden, samples), samples)

    def sample(
        self, hidden: torch.Tensor, samples: Samples, features: SamplingFeatures
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobTensors | None, torch.Tensor | None]:
        """Sample any rows. The third result has the wanted log-probabilities; the fourth, float32 [A, vocab], is for
        places that want those of every token."""
        logits, tables = self._logits(hidden, samples), self._tables
        device = logits.device
        asking = on_device(features.asking, device) if len(features.asking) else None
        raw = None if asking is None else gather_rows(logits, asking)
        if features.masks is not None:
            _apply_masks(logits, features.masks.result(), features.plan_indices)
            if raw is not None and len(features.of_grammar):
                masked = on_device(features.asking[features.of_grammar], device)
                raw.index_copy_(0, on_device(features.of_grammar, device), gather_rows(logits, masked))
        if features.bias is not None or len(features.penalized):
            logits = logits.float()
        if features.bias is not None:
            bias = features.bias
            add_bias(logits, *(on_device(part, device) for part in (bias.rows, bias.token_ids, bias.values)))
        for start in range(0, len(features.penalized), PENALIZED_TOGETHER):
            places = on_device(features.penalized[start : start + PENALIZED_TOGETHER], device)
            part = gather_rows(logits, places)
            apply_penalties(
                part, tables.columns, tables.token_ids, samples.rows[places], scratch=tables.penalty_scratch
            )
            logits.index_copy_(0, places, part)
        token_ids, finite = self._draw(logits, samples)
        if raw is None or asking is None:
            return token_ids, finite, None, None
        logprobs = compute_logprobs(raw, token_ids[asking], int(features.num_logprobs.max()))
        if not len(features.asking_all):
            return token_ids, finite, logprobs, None
        every = gather_rows(raw, on_device(features.asking_all, device)).float().log_softmax(-1)
        return token_ids, finite, logprobs, every

    def _logits(self, hidden: torch.Tensor, samples: Samples) -> torch.Tensor:
        rows = hidden if samples.logits_indices is None else gather_rows(hidden, samples.logits_indices)
        return self._compute_logits(rows)

    def _draw(self, logits: torch.Tensor, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        return sample_tokens(logits, self._tables.columns, samples.rows, samples.positions)


def _apply_masks(logits: torch.Tensor, masks: TokenMasks, plan_indices: NDArray[np.int64]) -> None:
    mask = logits_mask(masks, plan_indices)
    if mask is None:
        return
    mask_rows = np.full(len(logits), -1, dtype=np.int64)
    mask_rows[mask.rows] = np.arange(len(mask.rows))
    bits = mask.bits.view(np.int32)
    num_words = -(-logits.shape[1] // 32)
    if bits.shape[1] < num_words:  # tokens beyond the bits are not allowed
        bits = np.pad(bits, ((0, 0), (0, num_words - bits.shape[1])))
    apply_bitmask(logits, on_device(bits, logits.device), on_device(mask_rows, logits.device))


@dataclass(frozen=True)
class DeviceHiddenStates:
    """Implements `gpu.runner.prompt_outputs.HiddenStates` on the device. Its methods wait for the device."""

    hidden: torch.Tensor  # [T, hidden]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]

    def rows(self, part: slice) -> NDArray[np.float32]:
        return self.hidden[part].float().cpu().numpy()

    def logprobs(self, part: slice, token_ids: NDArray[np.int64], num_logprobs: int) -> list[TokenLogprobs]:
        logits = self.compute_logits(self.hidden[part])
        wants_every = num_logprobs == EVERY
        num_top = 0 if wants_every else min(num_logprobs, logits.shape[-1])
        found = compute_logprobs(logits, on_device(token_ids, logits.device), num_top)
        entries = logprob_entries(token_ids, found, [num_top] * len(token_ids))
        if wants_every:
            for entry, values in zip(entries, logits.float().log_softmax(-1).cpu().numpy(), strict=True):
                entry.every = values.tobytes()
        return entries


def logprob_entries(token_ids: NDArray[np.int64], found: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of S tokens (int64 [S]); entry i has the `counts[i]` most likely tokens."""
    rows = zip(token_ids.tolist(), *(tensor.tolist() for tensor in found), counts, strict=True)
    return [
        TokenLogprobs(token_id, chosen, rank, list(zip(top_ids[:count], top[:count], strict=True)))
        for token_id, chosen, rank, top_ids, top, count in rows
    ]
