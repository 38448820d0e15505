"""The decoder of `gpu.models.decoder`, computed by the library: same weights, same interface, one call a step.

What differs is where numbers are rounded. Weights keep the 4 and 8 bits of a GGUF file; activations are rounded to 8
bits where they meet such a matrix, 32 to a scale; everything between matrices is float32. A row's result is the same
bits whatever else is in the batch, however its prompt was cut into chunks, and whether the prefix cache had part of it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu.attention import AttentionMetadata
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from gpu.cpu.library import (
    STOP_INTERVAL,
    ForwardStruct,
    HeadsStruct,
    LayerStruct,
    Library,
    MatrixStruct,
    ModelStruct,
    StepStruct,
    StopFunction,
    Threads,
)
from gpu.cpu.matrices import LANES, PackedMatrix, pack, padded_rows
from gpu.cpu.memory import WeightBuffer, zeros
from gpu.layers.rotary import angles_of, inverse_frequencies
from gpu.models.loading import WeightsMismatch
from gpu.weights import Weight

TILE = 16  # tokens: `headrace::kTile`
MAX_GROUP = 24  # query heads over one KV head: `kMaxRows` of csrc/attention.cpp

# What is packed together: the name of the matrix, the parts below each other, whether their tiles take turns.
_MATRICES = (
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), False),
    ("out", ("self_attn.o_proj",), False),
    ("gate_up", ("mlp.gate_proj", "mlp.up_proj"), True),
    ("down", ("mlp.down_proj",), False),
)
_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}


class CPUCausalLM:
    """A `gpu.model_runner.LanguageModel` for one thread at a time. `quantized` False rounds all weights to bfloat16."""

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        block_size: int,
        max_model_len: int,
        num_threads: int,
        quantized: bool = True,
    ) -> None:
        """Draws all weights. Raises WeightsMismatch if they are not those of `config`."""
        self.config = config
        self.block_size = block_size
        self._library = library
        self._threads = Threads(library, num_threads)
        self._weight_buffer = WeightBuffer()
        self._tensors: list[torch.Tensor] = []  # what the structs point to
        self._matrices: list[PackedMatrix] = []
        self._layers = (LayerStruct * config.num_hidden_layers)()
        self._model = ModelStruct(
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            heads=HeadsStruct(
                query=config.num_attention_heads,
                kv=config.num_key_value_heads,
                dim=config.head_dim,
                block_size=block_size,
                window=config.sliding_window or 0,
                scale=config.head_dim**-0.5,
            ),
        )
        self.set_max_model_len(max_model_len)
        self._load(weights, quantized)
        self._head: MatrixStruct = self._model.embedding if config.tie_word_embeddings else self._model.head
        self._logits = torch.empty(0)
        self._stopped_by: BaseException | None = None

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the library has a way for this shape; all that it lacks are sizes that no published model has."""
        return (
            config.hidden_size % LANES == 0
            and config.intermediate_size % LANES == 0
            and config.head_dim % 16 == 0
            and config.num_attention_heads // config.num_key_value_heads <= MAX_GROUP
        )

    @property
    def tokens_held(self) -> int:
        """How many tokens a block of the cache has room for: whole tiles."""
        return -(-self.block_size // TILE) * TILE

    @property
    def forms(self) -> str:
        """How the weights are kept, for the log: "4-bit, 8-bit"."""
        names = {4: "4-bit", 8: "8-bit", 16: "bfloat16"}
        return ", ".join(names[form] for form in sorted({matrix.form for matrix in self._matrices}))

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """The zeroed cache of every layer; bfloat16, whatever `dtype` says. csrc/attention.h has its layout."""
        shape = (num_blocks, self.tokens_held // TILE, self.config.num_key_value_heads, 2, TILE * self.config.head_dim)
        layers = range(self.config.num_hidden_layers)
        return [zeros(2 * math.prod(shape)).view(torch.bfloat16).view(shape) for _ in layers]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """As `gpu.models.decoder.CausalLM.forward`; float32 [T, hidden].

        `cancellation_check` is asked every 20 ms or so.
        """
        num_tokens = input_ids.shape[0]
        hidden = torch.empty(num_tokens, self.config.hidden_size)
        block_table = metadata.block_table.contiguous()
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            layer.kv_cache = cache.data_ptr()
        step = ForwardStruct(
            step=StepStruct(
                num_tokens=num_tokens,
                num_requests=metadata.seq_lens.shape[0],
                positions=positions.data_ptr(),
                query_start_loc=metadata.query_start_loc.data_ptr(),
                seq_lens=metadata.seq_lens.data_ptr(),
                block_table=block_table.data_ptr(),
                block_table_stride=block_table.stride(0),
            ),
            input_ids=input_ids.data_ptr(),
            hidden=hidden.data_ptr(),
            stop=StopFunction() if cancellation_check is None else self._stop_function(cancellation_check),
            stop_interval=STOP_INTERVAL,
        )
        if self._library.functions.hr_forward(self._threads.handle, self._model, step):
            error, self._stopped_by = self._stopped_by, None
            assert error is not None
            raise error
        return hidden

    def set_max_model_len(self, max_model_len: int) -> None:
        """The longest context that is served, in tokens, where it is not the one that the model was made for."""
        config = self.config
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._rotary = torch.empty(2, max_model_len, inverse.shape[0])
        for positions, angles in angles_of(max_model_len, inverse):
            torch.cos(angles, out=self._rotary[0, positions])
            torch.sin(angles, out=self._rotary[1, positions])
        self._model.cosines, self._model.sines = (table.data_ptr() for table in self._rotary)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, hidden] -> float32 [R, vocab], in memory that the next call uses again."""
        rows, width = hidden.shape[0], padded_rows(self._head)
        if self._logits.numel() < rows * width:
            self._logits = torch.empty(rows * width)
        logits = self._logits[: rows * width].view(rows, width)
        self._library.functions.hr_multiply(
            self._threads.handle, self._head, hidden.data_ptr(), rows, None, logits.data_ptr(), width
        )
        return logits[:, : self.config.vocab_size]

    def most_likely(self, hidden: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """float32 [R, hidden] -> int64 [R], the token of the largest logit, the lowest of several; and bool [R], False
        where logits are not finite. The logits themselves are never written."""
        token_ids = np.empty(hidden.shape[0], dtype=np.int64)
        finite = np.empty(hidden.shape[0], dtype=np.bool_)
        self._library.functions.hr_largest_product(
            self._threads.handle,
            self._head,
            hidden.data_ptr(),
            hidden.shape[0],
            token_ids.ctypes.data,
            finite.ctypes.data,
        )
        return token_ids, finite

    def _stop_function(self, cancellation_check: Callable[[], None]) -> ctypes._CFunctionType:
        def stop() -> int:
            try:
                cancellation_check()
            except BaseException as error:  # nothing may be raised through the library; it is raised after it
                self._stopped_by = error
                return 1
            return 0

        return StopFunction(stop)

    def _load(self, weights: Iterable[tuple[str, Weight]], quantized: bool) -> None:
        """Pack every matrix as soon as its parts are there, so that little more than the model is in memory."""
        expected = tensor_shapes(self.config)
        waiting: dict[str, Weight] = {}
        groups = self._groups(quantized)
        for name, weight in weights:
            if expected.pop(name, None) != tuple(weight.shape):
                raise WeightsMismatch(f"Tensor {name} of shape {list(weight.shape)} has no place in this model.")
            waiting[name] = weight
            group = groups[name]
            if all(member in waiting for member in group.members):
                group.take([waiting.pop(member) for member in group.members])
        if expected:
            raise WeightsMismatch(f"{len(expected)} tensors are missing, among them {next(iter(expected))}.")

    def _groups(self, quantized: bool) -> dict[str, _Group]:
        """What becomes of each tensor, by its name."""
        groups: list[_Group] = []
        for index in range(self.config.num_hidden_layers):
            layer, prefix = self._layers[index], f"model.layers.{index}."
            for field, modules, interleave in _MATRICES:
                members = [f"{prefix}{module}.weight" for module in modules]
                groups.append(_Group(members, partial(self._set_matrix, layer, field, quantized, interleave)))
            for module, field in _NORMS.items():
                groups.append(_Group([f"{prefix}{module}.weight"], partial(self._set_vector, layer, field)))
            biases = [f"{prefix}{module}.bias" for module in _MATRICES[0][1]]
            groups.append(_Group(biases, partial(self._set_vector, layer, "qkv_bias")))
        groups.append(_Group(["model.norm.weight"], partial(self._set_vector, self._model, "final_norm")))
        groups.append(
            _Group(["model.embed_tokens.weight"], partial(self._set_matrix, self._model, "embedding", quantized, False))
        )
        groups.append(_Group(["lm_head.weight"], partial(self._set_matrix, self._model, "head", quantized, False)))
        return {member: group for group in groups for member in group.members}

    def _set_matrix(
        self, owner: object, field: str, quantized: bool, interleave: bool, parts: Sequence[Weight]
    ) -> None:
        matrix = pack(self._library, self._weight_buffer, parts, interleave=interleave, quantized=quantized)
        self._matrices.append(matrix)
        setattr(owner, field, matrix.struct)

    def _set_vector(self, owner: object, field: str, parts: Sequence[Weight]) -> None:
        vectors = [part if isinstance(part, torch.Tensor) else torch.from_numpy(part.dequantize()) for part in parts]
        padded = F.pad(torch.cat(vectors).float(), (0, LANES))  # read in whole tiles
        setattr(owner, field, self._keep(padded))

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.float().contiguous()
        self._tensors.append(tensor)
        return tensor.data_ptr()


@dataclass(frozen=True)
class _Group:
    """Tensors that become one field of a struct, in the order in which `take` wants them."""

    members: list[str]
    take: Callable[[Sequence[Weight]], None]
