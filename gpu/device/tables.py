"""The requests' rows on the device. Made by the runner; `upload` writes to them, and so do the steps themselves.

All tables lie in one int32 tensor, the buffer, so that whatever changes in them from one step to the next is one list
of (offset, values) and one scatter. A table is a view of it, float32 or int64 where its numbers are.
"""

from __future__ import annotations

import torch

from gpu.kernels import PenaltyTable, SamplingTable

# Rows of logits that are penalized together: the kernel wants a word of scratch for each of them and each token.
PENALIZED_TOGETHER = 32


class DeviceTables:
    """Rows 0 .. max_num_seqs - 1 are for requests. One more, `padding_row`, stays empty: the padding of a graph points
    to it. A row takes one token more than `max_model_len`, the last sample of a request that fills its context.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.padding_row = max_num_seqs
        self.num_rows = max_num_seqs + 1
        self.max_len = max_model_len + 1
        self.max_blocks = -(-self.max_len // block_size)
        self._offsets: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._size = 0

        self._place("seed", 2)  # first, because 64-bit words must lie at even offsets
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition",
            "presence",
            "frequency",
            "num_prompt_tokens",
            "num_tokens",
            "num_computed_tokens",
        ):
            self._place(name, 1)
        self._place("block_table", self.max_blocks)
        self._place("token_ids", self.max_len)
        # Of the step at hand: the rows in it, how many tokens each has, and which places of these sample.
        for name in ("batch_rows", "query_lens", "samples"):
            self._place(name, 1)
        self.buffer = torch.zeros(self._size, dtype=torch.int32, device=device)
        self.view("temperature").fill_(0)
        self.view("batch_rows").fill_(self.padding_row)

        self.num_tokens = self.view("num_tokens")
        self.num_computed_tokens = self.view("num_computed_tokens")
        self.block_table = self.view("block_table").view(self.num_rows, self.max_blocks)
        self.token_ids = self.view("token_ids").view(self.num_rows, self.max_len)
        self.batch_rows = self.view("batch_rows")
        self.query_lens = self.view("query_lens")
        self.samples = self.view("samples")
        self.sampling = SamplingTable(
            temperature=self.view("temperature", torch.float32),
            top_k=self.view("top_k"),
            top_p=self.view("top_p", torch.float32),
            min_p=self.view("min_p", torch.float32),
            seed=self.view("seed", torch.int64),
        )
        self.penalties = PenaltyTable(
            repetition=self.view("repetition", torch.float32),
            presence=self.view("presence", torch.float32),
            frequency=self.view("frequency", torch.float32),
            token_ids=self.token_ids,
            num_prompt_tokens=self.view("num_prompt_tokens"),
            num_tokens=self.num_tokens,
            scratch=torch.zeros((PENALIZED_TOGETHER, vocab_size), dtype=torch.int32, device=device),
        )

    def view(self, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A table as it lies in the buffer, flat."""
        offset = self._offsets[name]
        return self.buffer[offset : offset + self.num_rows * self._widths[name]].view(dtype)

    def offset(self, name: str, row: int = 0, index: int = 0) -> int:
        """Where in the buffer word `index` of this row lies."""
        return self._offsets[name] + row * self._widths[name] + index

    def _place(self, name: str, width: int) -> None:
        self._offsets[name] = self._size
        self._widths[name] = width
        self._size += width * self.num_rows
