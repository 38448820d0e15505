"""Kernels against their rooflines and against the best that torch has for the same work.

Shapes are those of an 8B model (Llama 3.1). The roofline of a kernel counts every input read once and every output
written once, and the products that it must make, at the measured ceilings of the card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import kernels
from gpu.kernels import attention
from gpu.kernels.product import MOST_ROWS, linear
from gpu.kernels.quantized import quantized_linear
from loadtest.gpu_parts.data import make_columns, make_logits, make_paged, make_quantized
from loadtest.gpu_parts.report import Report
from loadtest.gpu_parts.rooflines import Card
from loadtest.gpu_parts.timing import Timer

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer and of the timed steps."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab_size: int = 128256
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    long_context: int = 32768  # of one decode among the largest batch
    chunk_tokens: int = 8192  # of a prefill step
    chunk_prefix: int = 6144  # cached before a single long chunk
    long_prefixes: tuple[int, ...] = (4096, 32768, 100_000)  # cached before a few new tokens, as in an agent's turn
    new_tokens: int = 100
    rows: tuple[int, ...] = (1, 256, 8192)

    @staticmethod
    def tiny() -> Sizes:
        return Sizes(4, 2, 16, 64, 96, 512, (1, 4), 64, 256, 64, 48, (700,), 10, (1, 16))


@dataclass(frozen=True)
class KernelSpeed:
    """One run of all timings. Only `correct` kernels, which passed their checks, are timed."""

    report: Report
    timer: Timer
    card: Card
    dtype: torch.dtype
    sizes: Sizes
    correct: set[str]

    def run(self, time_is_left: Callable[[], bool]) -> None:
        for part in (self.decode, self.prefill, self.elementwise, self.sampler, self.matrices, self.quantized):
            if not time_is_left():
                self.report.note(f"kernels: {part.__name__} was left out, for time")
                continue
            part()

    def decode(self) -> None:
        sizes, context = self.sizes, self.sizes.context
        heads = (sizes.num_heads, sizes.num_kv_heads)
        for batch in sizes.batches:
            paged = make_paged([(1, context)] * batch, heads, sizes.head_dim, self.timer.device, self.dtype)
            num_bytes = 2 * batch * context * sizes.num_kv_heads * sizes.head_dim * self.dtype.itemsize
            self._add(
                "decode attention",
                f"decode attention, {batch} x {context}",
                paged.attend,
                num_bytes,
            )
            del paged
            query = self._random(batch, sizes.num_heads, 1, sizes.head_dim)
            key, value = (self._random(batch, sizes.num_kv_heads, context, sizes.head_dim) for _ in range(2))
            self._add_sdpa(f"decode attention, {batch} x {context}", query, key, value, causal=False, floor=num_bytes)
            del query, key, value
        batch, longest = sizes.batches[-1], sizes.long_context
        lengths = [(1, longest)] + [(1, context)] * (batch - 1)
        paged = make_paged(lengths, heads, sizes.head_dim, self.timer.device, self.dtype)
        num_bytes = 2 * (longest + (batch - 1) * context) * sizes.num_kv_heads * sizes.head_dim * self.dtype.itemsize
        name = f"decode attention, {batch - 1} x {context} and 1 x {longest}"
        self._add("decode attention", name, paged.attend, num_bytes)

    def prefill(self) -> None:
        sizes, total = self.sizes, self.sizes.chunk_tokens
        heads = (sizes.num_heads, sizes.num_kv_heads)
        length = min(sizes.context, total)
        width = sizes.num_heads * sizes.head_dim
        cases = {
            f"prefill attention, {total // length} x {length}": [(length, length)] * (total // length),
            f"prefill attention, 1 x {total}": [(total, total)],
            f"prefill attention, {total // 4} behind {sizes.chunk_prefix}": [
                (total // 4, total // 4 + sizes.chunk_prefix)
            ],
        }
        for name, lengths in cases.items():
            paged = make_paged(lengths, heads, sizes.head_dim, self.timer.device, self.dtype)
            pairs = sum(query * (tokens - query) + query * (query + 1) / 2 for query, tokens in lengths)
            self._add(
                "prefill attention",
                name,
                paged.attend,
                0,
                4 * pairs * width,
            )
            query_len, tokens = lengths[0]
            if query_len == tokens:  # what is_causal of torch means
                query = self._random(len(lengths), sizes.num_heads, query_len, sizes.head_dim)
                key, value = (self._random(len(lengths), sizes.num_kv_heads, tokens, sizes.head_dim) for _ in range(2))
                self._add_sdpa(name, query, key, value, causal=True, num_flops=4 * pairs * width)
        for prefix in sizes.long_prefixes:
            self._behind(prefix, heads)

    def _behind(self, prefix: int, heads: tuple[int, int]) -> None:
        """Time the attention of a few new tokens to a long prefix, with keys cut into parts and in one piece. Then time
        torch's attention with as many queries and keys, which is not causal."""
        sizes, queries = self.sizes, self.sizes.new_tokens
        tokens = prefix + queries
        flops = 4 * queries * (prefix + (queries + 1) / 2) * sizes.num_heads * sizes.head_dim
        paged = make_paged([(queries, tokens)], heads, sizes.head_dim, self.timer.device, self.dtype)
        name = f"prefill attention, {queries} behind {prefix}"
        self._add("attention behind long prefixes", name, paged.attend, 0, flops)
        with mock.patch.object(attention, "MIN_BLOCK_PART_TOKENS", 2**30):
            self._add("attention behind long prefixes", f"{name}, keys in one piece", paged.attend, 0, flops)
        del paged
        query = self._random(1, sizes.num_heads, queries, sizes.head_dim)
        key, value = (self._random(1, sizes.num_kv_heads, tokens, sizes.head_dim) for _ in range(2))
        self._add_sdpa(name, query, key, value, causal=False, num_flops=flops)

    def elementwise(self) -> None:
        sizes, item = self.sizes, self.dtype.itemsize
        heads = sizes.num_heads + 2 * sizes.num_kv_heads
        weight = self._random(sizes.hidden)
        for rows in sizes.rows:
            residual, delta = (self._random(rows, sizes.hidden) for _ in range(2))
            num_bytes = 4 * residual.numel() * item
            name = f"add and norm, {rows} rows"
            self._add("add_rms_norm", name, partial(kernels.add_rms_norm, residual, delta, weight, 1e-5), num_bytes)
            self._add_torch(
                name,
                partial(lambda r, d: F.rms_norm(r.add_(d), weight.shape, weight, 1e-5), residual, delta),
                num_bytes,
            )
            gate_up = self._random(rows, 2 * sizes.inner)
            name, num_bytes = f"silu and mul, {rows} rows", 3 * rows * sizes.inner * item
            self._add("silu_and_mul", name, partial(kernels.silu_and_mul, gate_up), num_bytes)
            self._add_torch(
                name, partial(lambda x: F.silu(x[:, : sizes.inner]) * x[:, sizes.inner :], gate_up), num_bytes
            )
            del gate_up
            num_blocks = -(-rows // 16)
            cache = self._random(num_blocks, 2, sizes.num_kv_heads, 16, sizes.head_dim)
            table = self._random(2, max(rows, 16), sizes.head_dim)
            positions = torch.randperm(rows, device=self.timer.device)
            qkv = self._random(rows, heads, sizes.head_dim)
            self._add(
                "rope_and_cache",
                f"rope and KV write, {rows} rows",
                partial(kernels.rope_and_cache, qkv, positions, table, cache, positions, num_heads=sizes.num_heads),
                2 * qkv.numel() * item,
            )
            embedding = self._random(sizes.vocab_size, sizes.hidden)
            indices = torch.randint(0, sizes.vocab_size, (rows,), device=self.timer.device)
            name, num_bytes = f"gather, {rows} rows", 2 * rows * sizes.hidden * item
            self._add("gather_rows", name, partial(kernels.gather_rows, embedding, indices), num_bytes)
            self._add_torch(name, partial(F.embedding, indices, embedding), num_bytes)

    def sampler(self) -> None:
        sizes = self.sizes
        for batch in (sizes.batches[0], sizes.batches[-1]):
            logits = make_logits(batch, sizes.vocab_size, self.timer.device, self.dtype)
            places = torch.arange(batch, device=self.timer.device)
            for what, values in (
                ("greedy", {"temperature": 0.0}),
                ("temperature", {}),
                ("top-k 50 and top-p 0.9", {"top_k": 50, "top_p": 0.9}),
                ("top-p 0.95", {"top_p": 0.95}),
                ("flat, top-p 0.95", {"top_p": 0.95, "temperature": 1.5}),
                ("top-k 1,000 and top-p 0.95", {"top_k": 1000, "top_p": 0.95}),
            ):
                columns = make_columns(batch, self.timer.device, **values)
                self._add(
                    "sample_tokens",
                    f"sampler, {what}, {batch} x {sizes.vocab_size}",
                    partial(kernels.sample_tokens, logits, columns, places, places),
                    logits.nbytes,
                )
            name = f"sampler, temperature, {batch} x {sizes.vocab_size}"
            self._add_torch(name, partial(lambda x: torch.multinomial(x.float().softmax(-1), 1), logits), logits.nbytes)
            self._add(
                "compute_logprobs",
                f"log-probabilities of 20, {batch} x {sizes.vocab_size}",
                partial(kernels.compute_logprobs, logits, places, 20),
                logits.nbytes,
            )

    def matrices(self) -> None:
        """Time the products of a layer and the head by cuBLAS and, for few rows, by `linear`. A step is no faster."""
        sizes = self.sizes
        width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        shapes = {
            "qkv": (width, sizes.hidden),
            "o": (sizes.hidden, sizes.num_heads * sizes.head_dim),
            "gate_up": (2 * sizes.inner, sizes.hidden),
            "down": (sizes.hidden, sizes.inner),
            "head": (sizes.vocab_size, sizes.hidden),
        }
        for rows in (*sizes.batches, sizes.chunk_tokens // 4):
            for name, (out_size, in_size) in shapes.items():
                if name == "head" and rows > max(sizes.batches):
                    continue
                x, weight = self._random(rows, in_size), self._random(out_size, in_size)
                num_bytes = (x.numel() + weight.numel() + rows * out_size) * self.dtype.itemsize
                floor = self.card.seconds(num_bytes, 2 * rows * out_size * in_size)
                seconds = self.timer.seconds(partial(F.linear, x, weight))
                self.report.add("cuBLAS", f"{name}, {rows} rows", seconds * 1e6, "us", floor * 1e6)
                if rows <= MOST_ROWS:
                    self._add("linear", f"{name}, {rows} rows", partial(linear, x, weight), num_bytes)

    def quantized(self) -> None:
        """Time a layer's widest product with quantized weights, to be compared with cuBLAS in 16 bits."""
        sizes = self.sizes
        for rows in (*sizes.batches, sizes.chunk_tokens // 4):
            for form in ("4 bits, groups of 128", "8 bits, groups of 128", "FP8, groups of 128"):
                matrix = make_quantized(form, 2 * sizes.inner, -(-sizes.hidden // 128) * 128, self.timer.device)
                (out_size, in_size), x = matrix.shape, self._random(rows, matrix.shape[1])
                num_bytes = matrix.numbers.nbytes + 2 * matrix.scales.nbytes + (x.numel() + rows * out_size) * 2
                name = f"gate_up, {form}, {rows} rows"
                function = partial(quantized_linear, x, matrix)
                self._add(f"linear layers, {form}", name, function, num_bytes, 2 * rows * out_size * in_size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.timer.device, dtype=self.dtype)

    def _add(
        self, kernel: str, name: str, function: Callable[[], object], num_bytes: float, num_flops: float = 0.0
    ) -> None:
        if kernel not in self.correct:
            self.report.note(f"kernels: {name} is not timed, because {kernel} is not correct here")
            return
        floor = self.card.seconds(num_bytes, num_flops)
        self.report.add("kernel", name, self.timer.seconds(function) * 1e6, "us", floor * 1e6)

    def _add_torch(self, name: str, function: Callable[[], object], num_bytes: float, num_flops: float = 0.0) -> None:
        floor = self.card.seconds(num_bytes, num_flops)
        self.report.add("torch", name, self.timer.seconds(function) * 1e6, "us", floor * 1e6)

    def _add_sdpa(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        floor: float = 0.0,
        num_flops: float = 0.0,
    ) -> None:
        """The fastest of torch's backends that takes these shapes, over keys that lie together in memory."""
        times = {}
        for backend in BACKENDS[: 3 if self.timer.on_cuda else 4]:
            try:
                with sdpa_kernel(backend):
                    times[backend.name] = self.timer.seconds(
                        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
                    )
            except RuntimeError:
                continue  # it does not take them
        if not times:
            self.report.note(f"torch: no backend of SDPA takes {name}")
            return
        best = min(times, key=times.__getitem__)
        seconds = self.card.seconds(floor, num_flops)
        self.report.add("torch", f"{name} ({best.lower()})", times[best] * 1e6, "us", seconds * 1e6)
