"""A step's inputs, made on the device out of its rows. Used by the runner.

Nothing here waits for the device, and no shape depends on what it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu.attention import AttentionMetadata
from gpu.device.tables import DeviceTables
from gpu.kernels import step_inputs
from gpu.rows import StepShape


class ModelInputs(NamedTuple):
    """The first arguments of `gpu.models.CausalLM.forward`: T tokens, one request after the other."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: list[AttentionMetadata]  # of each KV group


class Samples(NamedTuple):
    """Where tokens are drawn: S positions."""

    rows: torch.Tensor  # int64 [S]
    positions: torch.Tensor  # int64 [S], of the tokens to be drawn, counted from the start of their prompts
    logits_indices: torch.Tensor | None  # int64 [S], into the step's tokens; None where all are sampled, in order


def model_inputs(
    tables: DeviceTables,
    num_requests: int,
    num_tokens: int,
    shape: StepShape | None = None,
    *,
    all_decode: bool = False,
) -> ModelInputs:
    """Of the step that the tables hold: requests and tokens beyond those that it has are padding.

    In what a graph holds there is no `shape`: all that is known of the step lies on the device, but for whether
    everybody decodes and samples.
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
    return ModelInputs(input_ids, positions, metadata)


def samples_of(tables: DeviceTables, num_samples: int, *, all_decode: bool) -> Samples:
    """Of the step whose inputs were made last."""
    indices = None if all_decode else tables.logits_indices[:num_samples]
    return Samples(tables.sampling_rows[:num_samples], tables.sampled_positions[:num_samples], indices)
