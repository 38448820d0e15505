"""The torch model behind the interface of the worker and the host's runner (numpy in, numpy out), and its loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ConfigError
from gpu.attention import AttentionMetadata, TorchAttention, TritonAttention
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.cpu.communicator import SharedMemoryCommunicator
from gpu.cpu.library import Threads, draw, load_library
from gpu.host import has_bfloat16_instructions
from gpu.models.communicators import SharedTensors
from gpu.models.decoder import CausalLM
from gpu.models.state_layers import StateMetadata
from gpu.runner.runner import ModelInputs
from gpu.sampling import draw as numpy_draw
from gpu.sampling.draw import Shards, largest
from gpu.sharding import Communicator, vocabulary
from gpu.weights.tensors import as_tensors

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchModel:
    """A `gpu.model_loader.ServedModel`. On a CPU, float32 arrays are torch's own memory; elsewhere they are copies."""

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Keys and values have `kv_dtype`; None: `dtype`, the type of activations."""
        self.model = model
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        self.element_size = self.kv_dtype.itemsize
        self.tokens_held = block_size
        self.shards = None if model.communicator is None else self._shards(model.communicator)
        forms = [f"{str(dtype).removeprefix('torch.')} weights"]
        forms += ["quantized layers as they are stored"] * model.spec.keeps_packed
        forms += [f"keys and values in {str(kv_dtype).removeprefix('torch.')}"] * (self.kv_dtype != dtype)
        self.forms = f"{', '.join(forms)} (torch)"
        library = load_library()
        self.draw = numpy_draw.draw if library is None else partial(draw, Threads(library, torch.get_num_threads()))
        self.set_max_model_len = model.set_max_model_len
        self.kv_caches: list[torch.Tensor] = []
        self.states: torch.Tensor | None = None  # [slots, layers, numbers]

    @property
    def tokens_of_experts(self) -> list[NDArray[np.int64]]:
        """The tokens that each expert has had so far, for each layer with experts. Waits for the device."""
        return list(self.model.tokens_of_experts.cpu().numpy())

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.kv_caches = self.model.allocate_kv_cache(num_blocks, self.kv_dtype, self.device)

    def allocate_states(self, num_slots: int) -> None:
        """Allocate zeroed states, for a batch's rows and then for checkpoints, and append them to the caches."""
        self.states = self.model.allocate_states(num_slots, self.device)
        self.kv_caches += self.states.unbind(1)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, cancellation_check: Callable[[], None] | None = None) -> NDArray[np.float32]:
        query_lens = np.diff(inputs.query_start_loc)
        requests = np.repeat(np.arange(len(query_lens)), query_lens)
        blocks = inputs.block_tables[:, requests, inputs.positions // self.tokens_held].astype(np.int64)
        metadata = AttentionMetadata.of_groups(
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_tables=self._tensor(inputs.block_tables),
            slot_mappings=self._tensor(blocks * self.tokens_held + inputs.positions % self.tokens_held),
            num_decodes=inputs.num_decodes,
            query_lens_list=query_lens.tolist(),
            seq_lens_list=inputs.seq_lens.tolist(),
        )
        of_layers: list[AttentionMetadata | StateMetadata] = [*metadata]
        if inputs.states is not None and self.states is not None:
            for row, source in inputs.states.begins:
                self.states[row] = self.states[source] if source >= 0 else 0.0
            of_layers.append(
                StateMetadata(
                    query_lens_list=query_lens.tolist(),
                    num_decodes=inputs.num_decodes,
                    rows=self._tensor(inputs.states.rows),
                    saves=inputs.states.saves,
                )
            )
        ids, positions = self._tensor(inputs.input_ids), self._tensor(inputs.positions)
        residual = None if inputs.hidden is None else self._tensor(inputs.hidden).to(self.dtype)
        states = self.model.forward(ids, positions, of_layers, self.kv_caches, cancellation_check, residual)
        return states.float().cpu().numpy()

    @torch.inference_mode()
    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.model.compute_logits(self._tensor(hidden).to(self.dtype)).float().cpu().numpy()

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self.shards is None:
            return largest(self.compute_logits(hidden))
        return self.shards.largest(self.own_logits(hidden))

    @torch.inference_mode()
    def own_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[R, hidden] -> [R, tokens of this rank]"""
        return self.model.own_logits(self._tensor(hidden).to(self.dtype)).float().cpu().numpy()

    def _shards(self, communicator: Communicator) -> Shards:
        ranges = vocabulary(self.model.config.vocab_size, communicator.size)

        def gather(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
            return communicator.all_gather(self._tensor(values), sizes).cpu().numpy()

        return Shards(communicator.rank, [stop - start for start, stop in ranges], gather, self.own_logits)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def use_threads(number: int) -> None:
    """Set the number of threads that compute for the calling thread."""
    torch.set_num_threads(number)


def load_torch_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, Any]],
    *,
    dtype: str,
    device: str,
    block_size: int,
    max_model_len: int,
    num_threads: int,
    spec: DecoderSpec | None = None,
    communicator: Communicator | SharedMemoryCommunicator | None = None,
    kv_cache_dtype: str = "auto",
) -> TorchModel:
    """Build a model. Its steps run on this thread, or on one that has called `use_threads`."""
    use_threads(num_threads)
    # By default cuBLAS may add the parts of a long sum in 16 bits; all other code paths here use float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    place, kind = torch.device(device), resolve_dtype(dtype, config, device)
    spec = spec or spec_of(config)
    on_kernels = place.type == "cuda" and spec.has_kernels
    attention = partial(TritonAttention if on_kernels else TorchAttention, block_size=block_size)
    if isinstance(communicator, SharedMemoryCommunicator):
        communicator = SharedTensors(communicator)
    model = CausalLM(
        config,
        dtype=kind,
        device=place,
        max_model_len=max_model_len,
        attention=attention,
        spec=spec,
        communicator=communicator,
    )
    model.load_weights(as_tensors(weights))
    kv_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else kind
    served = TorchModel(model, kind, place, block_size=block_size, kv_dtype=kv_dtype)
    if place.type == "cuda" and not on_kernels:
        served.forms = f"{served.forms.removesuffix(')')}'s operations without CUDA graphs, the slow path)"
        logger.warning("%s has layers without a CUDA kernel. What computes it: %s", config.architecture, served.forms)
    return served


def resolve_dtype(name: str, config: ModelConfig, device: str) -> torch.dtype:
    """Return the type of weights, activations and KV.

    "auto" is the checkpoint's type on CUDA. On a CPU it is bfloat16 if the processor has instructions for it, which
    halves the bytes that each token reads, and float32 if not.
    """
    if name == "auto":
        if device == "cpu":
            return torch.bfloat16 if has_bfloat16_instructions() else torch.float32
        name = config.torch_dtype
    if name not in DTYPES:
        raise ConfigError("dtype", name, allowed=f"it must be auto, {', '.join(DTYPES)}", hint="dtype=auto works")
    return DTYPES[name]
