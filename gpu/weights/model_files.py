"""A model as it lies on disk: described at once, read when asked. What the other rooms import from here.

Torch-free until the first tensor is drawn, because the front end opens a model for its tokenizer and chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from gpu.config import ModelConfig
from gpu.weights.progress import Progress, no_progress
from gpu.weights.quantized_rows import QuantizedRows
from gpu.weights.tensors import checked_weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One opened model, whatever kind of file it came from. Made by `gpu.weights.open_model`.

    Safe to share between threads: nothing here changes after it was opened, except that the tokenizer is built once.
    """

    name: str  # what clients may call it: the alias, the file's stem, the directory's name or the repository id
    config: ModelConfig
    chat_template: str | None  # Jinja source; None for base models
    special_tokens: dict[str, str]  # what templates expect: "bos_token", "eos_token", ... to the token's text
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)  # use `tokenizer`, which builds it once
    # Use `weights()` or `packed_weights()`, which check. The argument is a device: what is not read from a file is made
    # there.
    read_weights: Callable[[str], Iterator[tuple[str, torch.Tensor | QuantizedRows]]] = field(repr=False)
    progress: Progress = field(default=no_progress, repr=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use (tens of milliseconds). Raises `ModelError`.

        `encode(text)` adds a BOS token where the model wants one; chat templates write their own, so encode their
        output with `add_special_tokens=False`.
        """
        return self.load_tokenizer()

    def weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight exactly once, in file order, under its Hugging Face name and in its row order.

        Tensors are on `device` and in the dtype of the file, float32 where the file is quantized. `lm_head.weight`
        is left out where the embedding is tied. On the CPU they may share memory with the mapped file: copy them, do
        not write to them. On another device they come one at a time (`gpu.weights.staging`), so no more than the
        largest of them is there beside what the caller keeps. Raises `ModelError` for a tensor that is missing,
        unknown, misshapen or of an unsupported type.
        """
        weights = _dequantized(self.packed_weights(device))
        if device == "cpu":
            return weights
        import torch

        from gpu.weights.staging import to_device

        return to_device(weights, torch.device(device))

    def packed_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
        """As `weights`, but what is read stays on the CPU, and what is quantized comes as the file has it."""
        return checked_weights(self.read_weights(device), self.config, source=self.name, progress=self.progress)


def _dequantized(weights: Iterator[tuple[str, torch.Tensor | QuantizedRows]]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, weight in weights:
        yield name, torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedRows) else weight
