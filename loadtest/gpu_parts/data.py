"""Random inputs for kernels: paged caches, sampling tables, logits. Everything that is not a request's own is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.device.tables import device_columns
from gpu.kernels import list_attention_work, paged_attention
from gpu.weights.tensors import QuantizedMatrix

BLOCK_SIZE = 16
# Bits (0: E4M3), inputs of a group (0: all), and whether groups have zero points of their own.
QUANTIZED = {
    "4 bits, groups of 128": (4, 128, False),
    "4 bits, groups of 64, zeros": (4, 64, True),
    "8 bits, groups of 128": (8, 128, False),
    "FP8, groups of 128": (0, 128, False),
    "FP8, by row": (0, 0, False),
}


@dataclass(frozen=True)
class Paged:
    """Requests in a paged cache, and the queries of their last tokens."""

    query: torch.Tensor  # [T, num_heads, head_dim]
    cache: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_table: torch.Tensor  # int32 [B, max_blocks]
    seq_lens: torch.Tensor  # int32 [B]
    query_start_loc: torch.Tensor  # int32 [B + 1]
    known: tuple[int, int]  # to the host: how many decode, which come first, and the most queries of a request

    def to(self, device: torch.device, dtype: torch.dtype) -> Paged:
        """The same numbers elsewhere, or in another type."""
        return Paged(
            self.query.to(device, dtype),
            self.cache.to(device, dtype),
            self.block_table.to(device),
            self.seq_lens.to(device),
            self.query_start_loc.to(device),
            self.known,
        )

    def attend(
        self, out: torch.Tensor | None = None, *, window: int | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernels at scale 0.1, and make the work list that the layers of a step share."""
        tables = (self.seq_lens, self.query_start_loc)
        num_decodes, longest = self.known
        work = list_attention_work(
            self.query, self.cache.shape[2], *tables, window=window, num_decodes=num_decodes, longest_chunk=longest
        )
        return paged_attention(
            self.query,
            self.cache,
            self.block_table,
            *tables,
            work,
            scale=0.1,
            window=window,
            sinks=sinks,
            num_decodes=num_decodes,
            out=out,
        )


def make_paged(
    lengths: list[tuple[int, int]],  # (query tokens, all tokens) of each request
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Paged:
    """Blocks are dealt in random order, and slots past a request's end hold NaN."""
    num_heads, num_kv_heads = heads
    blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    shape = (sum(blocks) + 1, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    cache = torch.randn(shape, device=device, dtype=dtype)
    dealt = torch.randperm(sum(blocks), device=device).int()
    block_table = torch.full((len(lengths), max(blocks)), 2**30, dtype=torch.int32, device=device)
    first = 0
    for i, (_, seq_len) in enumerate(lengths):
        block_table[i, : blocks[i]] = dealt[first : first + blocks[i]]
        first += blocks[i]
        used = (seq_len - 1) % BLOCK_SIZE + 1
        cache[dealt[first - 1], :, :, used:] = float("nan")
    cache[-1] = float("nan")
    query_lens = torch.tensor([0, *(query_len for query_len, _ in lengths)], device=device)
    return Paged(
        torch.randn(int(query_lens.sum()), num_heads, head_dim, device=device, dtype=dtype),
        cache,
        block_table,
        torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
        query_lens.cumsum(0).int(),
        (sum(query_len == 1 for query_len, _ in lengths), max(query_len for query_len, _ in lengths)),
    )


def make_logits(num_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Peaked about as much as a language model's."""
    return (torch.randn(num_rows, vocab_size, device=device) * 3).to(dtype)


def make_columns(num_rows: int, device: torch.device, **values: float) -> dict[str, torch.Tensor]:
    """Return the columns of the row table, equal for all rows except the seed. Parameters that are not in `values` are
    off; the temperature is 1."""
    columns = device_columns(num_rows) | {"seed": torch.arange(num_rows)}
    for name, value in ({"temperature": 1.0} | values).items():
        columns[name].fill_(value)
    return {name: column.to(device) for name, column in columns.items()}


def make_quantized(form: str, out_size: int, in_size: int, device: torch.device) -> QuantizedMatrix:
    """Return a random matrix of a form of `QUANTIZED`. Its products with standard normal inputs are about 1."""
    bits, group, has_zeros = QUANTIZED[form]
    num_groups = in_size // group if group else 1
    numbers = torch.randint(0, 256, (out_size, in_size // (2 if bits == 4 else 1)), dtype=torch.uint8, device=device)
    if bits == 0:
        numbers = torch.where(numbers & 127 == 127, 8, numbers)  # those two are no numbers
    typical = {4: 4.6, 8: 74.0, 0: 140.0}[bits] * in_size**0.5
    zeros = torch.randint(5, 11, (num_groups, out_size), dtype=torch.uint8, device=device) if has_zeros else None
    return QuantizedMatrix(
        numbers=numbers,
        scales=(torch.rand(num_groups, out_size, device=device) + 0.5) / typical,
        zeros=zeros,
        order=None,
        zero=0 if has_zeros or bits == 0 else 2 ** (bits - 1),
        bits=bits,
        group=group,
        columns=64,
    )
