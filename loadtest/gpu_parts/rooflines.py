"""Rooflines: the measured ceilings of a card and the work of a model give the shortest possible times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from loadtest.gpu_parts.models import kv_bytes_per_token
from loadtest.gpu_parts.timing import Timer

ELEMENT_SIZE = 2  # bytes of bfloat16 and float16


@dataclass(frozen=True)
class Card:
    """The measured ceilings of a card."""

    bandwidth: float  # bytes per second of a large copy, read and written
    flops: float  # floating-point operations per second of a large matrix product

    def seconds(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """Return the shortest time in seconds for so many bytes and operations."""
        return max(num_bytes / self.bandwidth, num_flops / self.flops)


def measure_card(timer: Timer, dtype: torch.dtype, *, copy_bytes: int, matrix_size: int) -> Card:
    """Measure the ceilings on random data: zeros can be faster than real data. A graph's copies are slower."""
    source = torch.randn(copy_bytes // dtype.itemsize, device=timer.device).to(dtype)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / timer.seconds(lambda: target.copy_(source), replayed=False)
    a, b = (torch.randn(matrix_size, matrix_size, device=timer.device).to(dtype) for _ in range(2))
    return Card(bandwidth, 2 * matrix_size**3 / timer.seconds(lambda: a @ b, replayed=False))


@dataclass(frozen=True)
class ModelWork:
    """The bytes and operations of one step of a model."""

    config: ModelConfig

    @property
    def body(self) -> int:
        """Parameters of the matrices of all layers."""
        return sum(
            shape[0] * shape[1]
            for name, shape in tensor_shapes(self.config).items()
            if len(shape) == 2 and name.startswith("model.layers.")
        )

    @property
    def head(self) -> int:
        """Parameters of the head, which is read whether it is tied or not."""
        return self.config.vocab_size * self.config.hidden_size

    def decode_floor(self, card: Card, batch: int, context: int) -> float:
        """Seconds of one step: matrices and attention come one after the other, so the two add up."""
        parameters = self.body + self.head
        matrices = card.seconds(parameters * ELEMENT_SIZE, 2 * parameters * batch)
        return matrices + card.seconds(batch * context * kv_bytes_per_token(self.config, ELEMENT_SIZE))

    def prefill_flops(self, prompts: int, length: int) -> float:
        """Return the operations of whole prompts of one length: causal attention sees half of all pairs, the head one
        token per prompt."""
        config = self.config
        width = config.num_attention_heads * config.head_dim
        attention = 2 * config.num_hidden_layers * length**2 * width
        return prompts * (2 * self.body * length + attention + 2 * self.head)

    def throughput_floor(self, card: Card, lengths: list[tuple[int, int]]) -> float:
        """Seconds for requests of (prompt, output) tokens that all run together from the start: prefill at the matrix
        rate, then one step per output token with those that are left."""
        seconds = sum(self.prefill_flops(1, prompt) for prompt, _ in lengths) / card.flops
        for step in range(max(output for _, output in lengths)):
            running = [prompt + step for prompt, output in lengths if output > step]
            seconds += self.decode_floor(card, len(running), 0)
            seconds += card.seconds(sum(running) * kv_bytes_per_token(self.config, ELEMENT_SIZE))
        return seconds
