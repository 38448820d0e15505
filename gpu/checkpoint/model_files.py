"""A model as it lies on disk: described at once, read when asked. What the other rooms import from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.default_sampling import Sampling
from gpu.checkpoint.embedder import Embedder
from gpu.checkpoint.progress import Progress, no_progress

if TYPE_CHECKING:
    from gpu.checkpoint.gguf_file import GGUFFile


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One opened model, whatever kind of file it came from. Made by `gpu.checkpoint.open_model`.

    Safe to share between threads: nothing here changes after it was opened, except that the tokenizer is built once.
    """

    name: str  # what clients may call it: the alias, the file's stem, the directory's name or the repository id
    config: ModelConfig
    chat_template: str | None  # Jinja source; None for base models
    special_tokens: dict[str, str]  # what templates expect: "bos_token", "eos_token", ... to the token's text
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)  # use `tokenizer`, which builds it once
    # Where the weights lie, for `gpu.weights`: a GGUF file, or safetensors. None: nowhere, random ones are made.
    tensors: GGUFFile | tuple[Path, ...] | None = field(repr=False)
    seed: int = 0  # of random weights
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of tokenizer_config.json
    embedder: Embedder = field(default=Embedder(), repr=False)  # pooling and prompts of embeddings
    load_sampling: Callable[[], Sampling] = field(default=dict, repr=False)  # use `sampling`, which warns once
    progress: Progress = field(default=no_progress, repr=False)

    @cached_property
    def sampling(self) -> Sampling:
        """What the authors recommend for what a request leaves open."""
        return self.load_sampling()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use (tens of milliseconds). Raises `ModelError`.

        `encode(text)` adds a BOS token where the model wants one; chat templates write their own, so encode their
        output with `add_special_tokens=False`.
        """
        return self.load_tokenizer()
