"""A model on disk: described at once, read on demand; digest, default sampling, progress."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from engine.messages import LOW_END_EXCLUDED, RANGES
from gpu.checkpoint.config import HeaderField, ModelConfig, ModelError, check_field
from gpu.checkpoint.embedder import Embedder
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.hf_files import read_header
from gpu.checkpoint.quantized_layers import QuantizedCheckpoint
from gpu.checkpoint.scorer import Scorer
from gpu.checkpoint.tensors import tensor_shapes

# ----------------------------------------------------------------------------------------------------- default sampling
# The sampling that a model's authors recommend, for parameters that a request does not set. The names are those that
# vLLM reads from generation_config.json, and those of llama.cpp's converter in GGUF's metadata. A value that requests
# may not have is ignored with a warning.


logger = logging.getLogger(__name__)

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING_FIELDS = (*_NAMES, "max_tokens")
HF_KEYS = {name: name for name in _NAMES} | {"max_new_tokens": "max_tokens"}
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

Sampling = Mapping[str, float]
"""Values by the names of `SamplingParams`, in their ranges."""


def default_sampling(find: Callable[[str], Any], keys: Mapping[str, str], source: str) -> Sampling:
    """Return the recommended values by the names of `SamplingParams`. `find` returns the value of a key of the file."""
    sampling: dict[str, float] = {}
    for key, name in keys.items():
        value = find(key)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # both mean all tokens
        low, high = RANGES[name]
        low = 1e-6 if name in LOW_END_EXCLUDED else max(low, 1) if name == "max_tokens" else low
        try:
            number = check_field(HeaderField(type(low), low, high, ""), value, key=key, source=source)
        except ModelError as error:
            logger.warning("%s This recommendation for sampling is ignored.", error)
        else:
            # GGUF has 32 bits: 0.95 would be shown as 0.949999988079071.
            sampling[name] = number if isinstance(number, int) else float(f"{number:.7g}")
    return sampling


# --------------------------------------------------------------------------------------------------------------- digest


SAMPLES = 64  # samples of each file, evenly spread, its beginning and end included
SAMPLE_BYTES = 4096


def model_digest(files: ModelFiles) -> bytes:
    """Return 32 bytes that identify the model's files, or the configuration and seed of random weights, in
    milliseconds.

    Each tensor is sampled, so a file with one changed tensor has another digest. Files that differ only between the
    samples have the same one. Fine-tuning and quantizing change nearly every byte of a tensor, so only a deliberate
    change is missed; the digest is used only in values shown to clients.
    """
    found = hashlib.blake2b(digest_size=32)
    found.update(repr((files.config, files.chat_template, sorted(files.special_tokens.items()))).encode())
    if files.tensors is None:
        found.update(f"random, seed {files.seed}".encode())
    for path in weight_paths(files):
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
            for middle in _middles(files, path):
                file.seek(max(0, middle - SAMPLE_BYTES // 2))
                found.update(file.read(SAMPLE_BYTES))
    return found.digest()


def _middles(files: ModelFiles, path: Path) -> list[int]:
    """Return the offset of each tensor's middle byte in a file."""
    if isinstance(files.tensors, GGUFFile):
        part = files.tensors.paths.index(path)
        return [each.offset + each.nbytes // 2 for each in files.tensors.tensors.values() if each.part == part]
    return [tensor.offset + tensor.num_bytes // 2 for tensor in read_header(path).values()]


def weight_paths(files: ModelFiles) -> tuple[Path, ...]:
    if files.tensors is None:
        return ()
    return files.tensors if isinstance(files.tensors, tuple) else files.tensors.paths


class Progress(Protocol):
    """A callback for the progress of slow work. It is called by the thread that does the work, and must be quick."""

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        """`phase` is a short sentence for people, such as "Loading weights".

        `done` and `total` are bytes while something is fetched or verified, tensors while weights are loaded; `total`
        is None as long as it is unknown. The last call of a phase that succeeds has `done == total`.
        """


def no_progress(phase: str, done: int, total: int | None) -> None:
    """A `Progress` that does nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One opened model, from any kind of file. Made by `gpu.checkpoint.resolve.open_model`. Thread-safe: nothing
    changes after it was opened, except that the tokenizer is built once."""

    name: str  # for clients: the alias, the file's stem, the directory's name or the repository id
    config: ModelConfig
    chat_template: str | None  # Jinja source; None for base models
    special_tokens: dict[str, str]  # variables of templates: "bos_token", "eos_token", ... to the token's text
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)  # use `tokenizer`, which builds it once
    # The files of the weights, for `gpu.weights`: a GGUF file, or safetensors. None: random weights are made.
    tensors: GGUFFile | tuple[Path, ...] | None = field(repr=False)
    quantized: QuantizedCheckpoint | None = None  # how safetensors hold quantized linear layers
    seed: int = 0  # seed of random weights
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # tokenizer_config.json
    embedder: Embedder = field(default=Embedder(), repr=False)  # pooling and prompts of embeddings
    scorer: Scorer | None = field(default=None, repr=False)  # of a classifier or reranker
    load_sampling: Callable[[], Sampling] = field(default=dict, repr=False)  # use `sampling`, which warns once
    progress: Progress = field(default=no_progress, repr=False)

    @cached_property
    def sampling(self) -> Sampling:
        """The authors' recommended values for parameters that a request does not set."""
        return self.load_sampling()

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, tensor_shapes(self.config).values()))

    @property
    def weight_type(self) -> str:
        """The type of most of the weights, as GGUF files name it; of quantized safetensors, that of the others."""
        if isinstance(self.tensors, GGUFFile):
            sizes = Counter[str]()
            for tensor in self.tensors.tensors.values():
                sizes[tensor.type.name] += tensor.nbytes
            return max(sizes, key=sizes.__getitem__)
        return {"float32": "F32", "float16": "F16"}.get(self.config.torch_dtype, "BF16")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use (tens of milliseconds). Raises `ModelError`.

        `encode(text)` adds a BOS token where the model wants one; chat templates write their own, so encode their
        output with `add_special_tokens=False`.
        """
        return self.load_tokenizer()
