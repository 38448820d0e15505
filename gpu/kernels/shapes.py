"""Types that the kernels and their references share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class StepTables(Protocol):
    """The tables of a step on the device, as `gpu.device.tables.DeviceTables` keeps them: one row per request."""

    device: torch.device
    buffer: torch.Tensor
    block_size: int
    padding_row: int  # a row that no request uses; the padding of a graph points to it
    num_tokens: torch.Tensor
    num_computed_tokens: torch.Tensor
    block_tables: torch.Tensor
    token_ids: torch.Tensor
    batch_rows: torch.Tensor
    query_start_loc: torch.Tensor
    one_each: torch.Tensor
    seq_lens: torch.Tensor
    sampling_rows: torch.Tensor
    sampled_positions: torch.Tensor


ROWS = 32  # of one expert that a program of the kernel takes at a time


class Groups(NamedTuple):
    """The M = T * top_k pairs of a token and an expert, in the order of the experts. Shapes depend on M alone."""

    order: torch.Tensor  # int64 [M], pairs by their number: token * top_k + place among the token's experts
    starts: torch.Tensor  # int64 [experts + 1], where in `order` an expert's pairs begin
    block_ends: torch.Tensor  # int64 [experts], how many blocks of `ROWS` pairs there are up to the end of an expert's
    top_k: int
