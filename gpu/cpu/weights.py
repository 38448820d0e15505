"""The way of a checkpoint's tensors into the structs of the library: which become which field, and packed how."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import ClampedSwiGLUSpec, DecoderSpec, MoESpec, Part, RMSNormSpec
from gpu.checkpoint.tensors import checked
from gpu.cpu.library import ExpertsStruct, ExpertStruct, LayerStruct, Library, ModelStruct
from gpu.cpu.matrices import LANES, PackedMatrix, pack
from gpu.cpu.memory import WeightBuffer
from gpu.weights import Weight, floats


class PackedWeights:
    """The weights of one model, or of one rank's part of it. The structs point into what it keeps."""

    def __init__(self, library: Library, model: ModelStruct, spec: DecoderSpec, *, quantized: bool) -> None:
        """For the structs of `spec`, whose other fields are set. `quantized` False rounds all to bfloat16."""
        self.matrices: list[PackedMatrix] = []
        self.tokens_of_experts: list[NDArray[np.int64]] = []
        self._library, self._model, self._spec, self._quantized = library, model, spec, quantized
        self._buffer = WeightBuffer()
        self._vectors: list[NDArray[np.float32]] = []
        self._experts: list[object] = []

    def load(self, weights: Iterable[tuple[str, Weight]], config: ModelConfig) -> None:
        """Pack every matrix as soon as its parts are there, so that little more than the model is in memory. Raises
        ModelError if they are not those of the spec."""
        groups = self._groups()
        waiting: dict[str, Weight] = {}
        for name, weight in checked(weights, config, source="The checkpoint", spec=self._spec):
            waiting[name] = weight
            group = groups[name]
            if all(member in waiting for member in group.members):
                group.take([waiting.pop(member) for member in group.members])

    def _groups(self) -> dict[str, _Group]:
        """What becomes of each tensor, by its name."""
        spec, groups = self._spec, list[_Group]()

        def matrix(owner: object, field: str, *parts: Part, interleave: bool = False) -> None:
            take = partial(self._set_matrix, owner, field, interleave)
            groups.append(_Group([part.weight_name for part in parts], take))

        def vector(owner: object, field: str, *names: str) -> None:
            groups.append(_Group(list(names), partial(self._set_vector, owner, field)))

        def norm(owner: object, field: str, spec: RMSNormSpec) -> None:
            vector(owner, field, spec.weight.weight_name)

        for struct, layer in zip(self._model.layers[: len(spec.layers)], spec.layers, strict=True):
            attention, network = layer.attention, layer.feed_forward
            norm(struct, "attention_norm", layer.attention_norm)
            matrix(struct, "qkv", *attention.qkv)
            if attention.qkv[0].bias:
                vector(struct, "qkv_bias", *(f"{part.name}.bias" for part in attention.qkv))
            post_norms = (layer.attention_post_norm, layer.feed_forward_post_norm)
            fields = ("attention_post_norm", "mlp_post_norm", "q_norm", "k_norm")
            for field, further in zip(fields, (*post_norms, *(attention.qk_norm or ())), strict=False):
                if further is not None:
                    norm(struct, field, further)
            if attention.sinks is not None:
                vector(struct.heads, "sinks", attention.sinks.weight_name)
            matrix(struct, "out", attention.out)
            if attention.out.bias:
                vector(struct, "out_bias", f"{attention.out.name}.bias")
            norm(struct, "mlp_norm", layer.feed_forward_norm)
            if isinstance(network, MoESpec):
                groups += self._expert_groups(struct, network, matrix, vector)
                continue
            matrix(struct, "gate_up", network.gate, network.up, interleave=True)  # their tiles take turns
            matrix(struct, "down", network.down)
        if spec.norm is not None:
            norm(self._model, "final_norm", spec.norm)
        if spec.embedding is not None:
            matrix(self._model, "embedding", spec.embedding)
        if spec.head is not None:
            matrix(self._model, "head", spec.head)
        return {member: group for group in groups for member in group.members}

    def _expert_groups(
        self, layer: LayerStruct, spec: MoESpec, matrix: Callable[..., None], vector: Callable[..., None]
    ) -> list[_Group]:
        """What becomes of a layer's experts; `matrix` and `vector` are those of `_groups`."""
        network, groups = spec.experts[0], list[_Group]()
        each = (ExpertStruct * len(spec.experts))()
        tokens = np.zeros(spec.router.shape[0], dtype=np.int64)
        experts = ExpertsStruct(
            experts=ctypes.cast(each, ctypes.POINTER(ExpertStruct)),
            first=spec.first,
            here=len(spec.experts),
            count=len(tokens),
            top_k=spec.top_k,
            normalized=spec.normalized,
            tokens=tokens.ctypes.data,
        )
        if isinstance(network, ClampedSwiGLUSpec):
            experts.alpha, experts.limit = network.alpha, network.limit
        layer.experts = ctypes.pointer(experts)
        self.tokens_of_experts.append(tokens)
        self._experts += [each, experts]
        vector(experts, "router", spec.router.weight_name)
        if spec.router.bias:
            vector(experts, "router_bias", f"{spec.router.name}.bias")
        for struct, expert in zip(each, spec.experts, strict=True):
            matrix(struct, "gate_up", expert.gate, expert.up, interleave=True)
            matrix(struct, "down", expert.down)
            if expert.gate.bias:
                names = [f"{expert.gate.name}.bias", f"{expert.up.name}.bias"]
                groups.append(_Group(names, partial(self._set_interleaved, struct, "gate_up_bias")))
            if expert.down.bias:
                vector(struct, "down_bias", f"{expert.down.name}.bias")
        return groups

    def _set_interleaved(self, owner: object, field: str, parts: Sequence[Weight]) -> None:
        """Biases of matrices whose tiles take turns."""
        tiles = np.stack([floats(part).reshape(-1, LANES) for part in parts], axis=1)
        self._set_vector(owner, field, [tiles])

    def _set_matrix(self, owner: object, field: str, interleave: bool, parts: Sequence[Weight]) -> None:
        matrix = pack(self._library, self._buffer, parts, interleave=interleave, quantized=self._quantized)
        self.matrices.append(matrix)
        setattr(owner, field, matrix.struct)

    def _set_vector(self, owner: object, field: str, parts: Sequence[Weight]) -> None:
        padding = np.zeros(LANES, dtype=np.float32)  # read in whole tiles
        vector = np.concatenate([*(floats(part).ravel() for part in parts), padding])
        self._vectors.append(vector)
        setattr(owner, field, vector.ctypes.data)


@dataclass(frozen=True)
class _Group:
    """Tensors that become one field of a struct, in the order in which `take` wants them."""

    members: list[str]
    take: Callable[[Sequence[Weight]], None]
