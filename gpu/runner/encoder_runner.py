"""The runner of an encoder, which computes every prompt whole, pools its hidden states and applies the model's heads.

There is nothing to cache and nothing to sample: a request is in one step, so the runner keeps no batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import Pooling
from engine.plan import ModelRunnerOutput, NewRequestData, SchedulerOutput
from gpu.checkpoint.encoder import DenseSpec, EncoderSpec, LayerNormSpec
from gpu.checkpoint.tensors import shapes_of
from gpu.runner.runner import FinishedStep, cancellation_check
from gpu.weights.reading import floats

Floats = NDArray[np.float32]


class EncoderInputs(NamedTuple):
    """The inputs of a step: B whole prompts of T tokens in all, one after the other."""

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T], rows of the position table, or positions to rotate by
    types: NDArray[np.int64]  # [T], 1 for tokens of the second of two texts
    query_start_loc: NDArray[np.int32]  # [B + 1]


class Encoder(Protocol):
    """An encoder with its weights in place."""

    @property
    def forms(self) -> str:
        """The form of the weights and what computes with them, for the log."""

    def encode(self, inputs: EncoderInputs, cancellation_check: Callable[[], None] | None = None) -> Floats:
        """Return the last hidden states, [T, hidden]. Calls `cancellation_check` between layers, or less often; an
        exception from it ends the pass."""


class EncoderRunner:
    """A `gpu.runner.runner.Runner` that has run a step when `submit` returns. `heads` has the weights of the heads."""

    def __init__(self, encoder: Encoder, spec: EncoderSpec, heads: EncoderHeads) -> None:
        self._encoder = encoder
        self._spec = spec
        self._heads = heads
        self._requests: dict[str, NewRequestData] = {}

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> FinishedStep:
        for request_id in plan.removed_request_ids:
            self._requests.pop(request_id, None)
        self._requests |= {request.request_id: request for request in plan.new_requests}
        output = ModelRunnerOutput(sampled_token_ids=[[0] for _ in plan.request_ids], logprobs={})
        if plan.request_ids:
            requests = [self._requests[request_id] for request_id in plan.request_ids]
            inputs = self.inputs(requests)
            hidden = self._encoder.encode(inputs, cancellation_check(abandoned))
            spans = pairwise(inputs.query_start_loc.tolist())
            vectors = [
                self._pooled(request, hidden[slice(*span)]) for request, span in zip(requests, spans, strict=True)
            ]
            for index, vector in enumerate(self._heads.apply(vectors, [request.pooling for request in requests])):
                output.embeddings[index] = vector.tobytes()
                if not np.isfinite(vector.sum()):
                    output.not_finite.append(index)
        return FinishedStep(output)

    def prepare(self) -> bool:
        return False

    def record(self, sampled_token_ids: list[list[int]] | None) -> None:
        raise NotImplementedError  # an encoder has no pipeline stages

    def inputs(self, requests: list[NewRequestData]) -> EncoderInputs:
        ids = [np.array(request.token_ids, np.int64) for request in requests]
        table = self._spec.token_types
        has_types = table is not None and table.shape[0] > 1
        types = [
            has_types & (np.arange(len(each)) >= (request.second_segment or len(each)))
            for each, request in zip(ids, requests, strict=True)
        ]
        return EncoderInputs(
            input_ids=np.concatenate(ids),
            positions=np.concatenate([self._positions(each) for each in ids]),
            types=np.concatenate(types).astype(np.int64),
            query_start_loc=np.cumsum([0, *map(len, ids)]).astype(np.int32),
        )

    def _positions(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        first, padding = self._spec.first_position, self._spec.padding
        if padding is None:
            return np.arange(first, first + len(token_ids))
        counts = token_ids != padding
        return first - 1 + np.cumsum(counts) * counts

    def _pooled(self, request: NewRequestData, rows: Floats) -> Floats:
        """Return the vector of a prompt, or the rows of all tokens."""
        kind = Pooling(self._spec.classifier_pooling) if request.pooling is Pooling.CLASSIFY else request.pooling
        match kind:
            case Pooling.CLS:
                return rows[0]
            case Pooling.LAST:
                return rows[-1]
            case Pooling.WEIGHTED_MEAN:
                weights = np.arange(1, len(rows) + 1, dtype=np.float32)
                return (rows * weights[:, None]).sum(0) / weights.sum()
            case Pooling.MEAN | None:
                return rows[min(request.num_unpooled, len(rows) - 1) :].mean(0)
        return rows


# ---------------------------------------------------------------------------------------------------------------- heads
# Their matrices are small, and are multiplied with few vectors: numpy computes them, whatever computes the encoder.


def _erf(x: Floats) -> Floats:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _gelu_tanh(x: Floats) -> Floats:
    return np.asarray(x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2, np.float32)


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x * np.float32(0.5**0.5))) / np.float32(2),
    "gelu_tanh": _gelu_tanh,
}


class EncoderHeads:
    """The layers of an encoder's heads, with their weights in float32."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._weights: dict[str, Floats] = {}

    def take(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Keep the weights of the heads, and yield the others."""
        own = heads_shapes(self._spec)
        for name, weight in weights:
            if name in own:
                self._weights[name] = np.array(floats(weight))
            else:
                yield name, weight

    def apply(self, vectors: list[Floats], poolings: list[Pooling | None]) -> list[Floats]:
        """Return the results of the heads that the requests' pooling asks for, in float32."""
        spec, results = self._spec, list(vectors)
        heads: dict[tuple[DenseSpec, ...], list[int]] = {}
        for index, kind in enumerate(poolings):
            layers = (
                spec.classifier
                if kind is Pooling.CLASSIFY
                else spec.token_dense
                if kind is Pooling.TOKENS
                else spec.dense
            )
            heads.setdefault(layers, []).append(index)
        for layers, indices in heads.items():
            if layers:
                rows = np.concatenate([np.atleast_2d(vectors[index]) for index in indices])
                for layer in layers:
                    rows = self._layer(layer, rows)
                sizes = np.cumsum([len(np.atleast_2d(vectors[index])) for index in indices])[:-1]
                for index, part in zip(indices, np.split(rows, sizes), strict=True):
                    results[index] = part
        return [np.ascontiguousarray(each, np.float32) for each in results]

    def _layer(self, layer: DenseSpec, rows: Floats) -> Floats:
        part = layer.weight
        rows = rows @ self._weights[part.weight_name].T
        if part.bias:
            rows = rows + self._weights[f"{part.name}.bias"]
        rows = _ACTIVATIONS[layer.activation](rows)
        if layer.norm is not None:
            if isinstance(layer.norm, LayerNormSpec):
                rows = rows - rows.mean(1, keepdims=True)
            scale = 1 / np.sqrt(np.square(rows).mean(1, keepdims=True) + np.float32(layer.norm.eps))
            rows = rows * scale * self._weights[layer.norm.weight.weight_name]
            if layer.norm.weight.bias:
                rows = rows + self._weights[f"{layer.norm.weight.name}.bias"]
        return rows


def heads_shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the weights of the heads."""
    return shapes_of(spec.heads)
