"""The library's encoders against float64, for each kind of layer, and the bits it promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import Heads, Part, RMSNormSpec, Rope, parts_of
from gpu.checkpoint.encoder import (
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderNetworkSpec,
    EncoderSpec,
    LayerNormSpec,
)
from gpu.cpu.decoder import ACTIVATIONS
from gpu.cpu.encoder import CPUEncoder
from gpu.cpu.library import load_library
from gpu.runner.encoder_runner import EncoderInputs
from tests.gpu.native_builds import needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("every_build")]

HIDDEN, INNER, VOCABULARY, LONGEST = 96, 144, 53, 700
LENGTHS = [1, 16, 17, 45, 2, 290, 64]  # around those of tiles, windows and stretches of keys
Floats = NDArray[Any]


def layer(
    index: int,
    *,
    norm: type[RMSNormSpec] = LayerNormSpec,
    norms: Sequence[str] = ("attention_sum_norm", "feed_forward_sum_norm"),
    bias: bool = True,
    activation: str = "gelu",
    gated: bool = False,
    theta: float | None = None,
    reach: int | None = None,
    heads: tuple[int, int, int] = (6, 6, 16),
    qk_norm: bool = False,
) -> EncoderLayerSpec:
    query, kv, dim = heads

    def part(name: str, *shape: int, bias: bool = bias) -> Part:
        return Part(f"{index}.{name}", name, shape, bias=bias)

    def normed(name: str, size: int = HIDDEN) -> RMSNormSpec:
        return norm(part(name, size, bias=bias and norm is LayerNormSpec), 1e-5)

    attention = EncoderAttentionSpec(
        heads=Heads(query, kv, dim, dim**-0.5),
        qkv=tuple(part(name, count * dim, HIDDEN) for name, count in zip("qkv", (query, kv, kv), strict=True)),
        out=part("out", HIDDEN, query * dim),
        qk_norm=(normed("q_norm", dim), normed("k_norm", dim)) if qk_norm else None,
        rope=Rope(theta or 1.0, dim=None if theta else 0),
        reach=reach,
    )
    network = EncoderNetworkSpec(
        up=part("up", INNER, HIDDEN, bias=bias and not gated),
        down=part("down", HIDDEN, INNER),
        activation=activation,
        gate=part("gate", INNER, HIDDEN, bias=False) if gated else None,
    )
    fields: dict[str, Any] = dict.fromkeys(("attention_norm", "feed_forward_norm"))
    return EncoderLayerSpec(
        attention=attention, feed_forward=network, **fields | {name: normed(name) for name in norms}
    )


def encoder(layers: Sequence[EncoderLayerSpec], *, tables: bool = True, ends: bool = False, **more: Any) -> EncoderSpec:
    """Return an encoder with tables of positions and types, or with a norm at its end."""
    norm = layers[0].attention_sum_norm or layers[0].feed_forward_norm
    assert norm is not None

    def normed(name: str) -> RMSNormSpec:
        return replace(norm, weight=replace(norm.weight, name=name))

    return EncoderSpec(
        embedding=Part("words", "words", (VOCABULARY, HIDDEN)),
        positions=Part("positions", "positions", (LONGEST + 2, HIDDEN)) if tables else None,
        token_types=Part("types", "types", (2, HIDDEN)) if tables else None,
        embedding_norm=normed("first"),
        layers=tuple(layers),
        norm=normed("last") if ends else None,
        head=None,
        **more,
    )


PRE = ("attention_norm", "feed_forward_norm")
POST = ("attention_post_norm", "feed_forward_post_norm")
SPECS = {
    "bert": encoder([layer(index) for index in range(3)]),
    "bert-relu": encoder([layer(index, activation="relu") for index in range(2)]),
    "bert-tanh": encoder([layer(index, activation="gelu_tanh") for index in range(2)]),
    "nomic": encoder([layer(index, bias=False, activation="silu", gated=True, theta=1000.0) for index in range(2)]),
    "modern": encoder(
        [
            layer(
                index, norms=PRE[index == 0 :], bias=False, gated=True, theta=100.0 + index, reach=(None, 32)[index % 2]
            )
            for index in range(3)
        ],
        tables=False,
        ends=True,
    ),
    "gemma": encoder(
        [
            layer(
                index, norm=RMSNormSpec, norms=PRE + POST, bias=False, activation="gelu_tanh", gated=True, theta=100.0,
                heads=(4, 2, 32), qk_norm=True, reach=20,
            )
            for index in range(2)
        ],
        tables=False,
        ends=True,
        embedding_scale=9.8,
    ),
}  # fmt: skip


def config_of(spec: EncoderSpec) -> ModelConfig:
    heads = spec.layers[0].attention.heads
    return ModelConfig(
        architecture="Encoder",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=heads.query,
        num_key_value_heads=heads.kv,
        head_dim=heads.dim,
        max_position_embeddings=LONGEST,
        encoder=spec,
    )


def weights_of(spec: EncoderSpec) -> dict[str, Floats]:
    """Return weights that bfloat16 holds, large enough for attention to be far from uniform."""
    generator, weights = np.random.default_rng(3), dict[str, Floats]()
    for part in parts_of(spec):
        norm = len(part.shape) == 1
        scale = (
            0.3 if norm else 1.0 if part.shape[1] == HIDDEN and part.shape[0] in (VOCABULARY, LONGEST + 2, 2) else 0.15
        )
        weights[part.weight_name] = generator.normal(float(norm), scale, part.shape)
        if part.bias:
            weights[f"{part.name}.bias"] = generator.normal(0, 0.3, part.shape[:1])
    return {
        name: (array.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        for name, array in weights.items()
    }


class Oracle:
    """An encoder in float64, for one request at a time."""

    def __init__(self, spec: EncoderSpec, weights: dict[str, Floats]) -> None:
        self._spec, self._weights = spec, {name: array.astype(np.float64) for name, array in weights.items()}

    def __call__(self, ids: Floats, positions: Floats, types: Floats) -> Floats:
        spec, table = self._spec, self._weights
        x = table["words.weight"][ids] * spec.embedding_scale
        if spec.positions is not None:
            x = x + table["positions.weight"][positions] + table["types.weight"][types]
        x = self._norm(spec.embedding_norm, x)
        for each in cast(Any, spec.layers):
            y = self._attention(each.attention, self._norm(each.attention_norm, x))
            x = self._norm(each.attention_sum_norm, x + self._norm(each.attention_post_norm, y))
            y = self._network(each.feed_forward, self._norm(each.feed_forward_norm, x))
            x = self._norm(each.feed_forward_sum_norm, x + self._norm(each.feed_forward_post_norm, y))
        return self._norm(spec.norm, x)

    def _product(self, part: Part, x: Floats) -> Floats:
        return x @ self._weights[part.weight_name].T + self._weights.get(f"{part.name}.bias", 0.0)

    def _norm(self, norm: RMSNormSpec | None, x: Floats) -> Floats:
        if norm is None:
            return x
        if isinstance(norm, LayerNormSpec):
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
        return x * self._weights[norm.weight.weight_name] + self._weights.get(f"{norm.weight.name}.bias", 0.0)

    def _attention(self, spec: EncoderAttentionSpec, x: Floats) -> Floats:
        tokens, heads, dim = np.arange(len(x)), spec.heads, spec.heads.dim
        q, k, v = (self._product(part, x).reshape(len(x), -1, dim) for part in spec.qkv)
        if spec.qk_norm is not None:
            q, k = (self._norm(norm, each) for norm, each in zip(spec.qk_norm, (q, k), strict=True))
        if spec.rope.dim != 0:
            angles = np.outer(tokens, spec.rope.theta ** (-np.arange(0, dim, 2) / dim))[:, None]
            q, k = (
                np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1)
                for a, b in (np.split(each, 2, axis=-1) for each in (q, k))
            )
        k, v = (np.repeat(each, heads.query // heads.kv, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * heads.scale
        if spec.reach is not None:
            scores[:, np.abs(tokens[:, None] - tokens) > spec.reach] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self._product(spec.out, np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1))

    def _network(self, spec: EncoderNetworkSpec, x: Floats) -> Floats:
        up = self._product(spec.up, x)
        gate = up if spec.gate is None else self._product(spec.gate, x)
        return self._product(spec.down, activated(spec.activation, gate) * (1.0 if spec.gate is None else up))


def activated(name: str, x: Floats) -> Floats:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def batch(lengths: Sequence[int], *, first_position: int = 2) -> EncoderInputs:
    """Return requests whose tokens depend only on their length; their second halves have type 1."""
    ids = [np.random.default_rng(length).integers(0, VOCABULARY, length) for length in lengths]
    tokens = [np.arange(length) for length in lengths]
    return EncoderInputs(
        input_ids=np.concatenate(ids),
        positions=np.concatenate(tokens) + first_position,
        types=np.concatenate([2 * each // len(each) for each in tokens]),
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
    )


def load(spec: EncoderSpec, weights: dict[str, Floats], num_threads: int = 2) -> CPUEncoder:
    library, config = load_library(), config_of(spec)
    assert library is not None
    assert CPUEncoder.supports(config)
    return CPUEncoder(
        library,
        config,
        iter(weights.items()),
        num_threads=num_threads,
        quantized=True,
        max_model_len=LONGEST,
        max_num_batched_tokens=2048,
    )


def requests(inputs: EncoderInputs) -> list[slice]:
    starts = inputs.query_start_loc.tolist()
    return [slice(start, end) for start, end in pairwise(starts)]


@pytest.mark.parametrize("name", SPECS)
def test_hidden_states_equal_those_in_float64(name: str) -> None:
    weights, inputs = weights_of(SPECS[name]), batch(LENGTHS)
    hidden = load(SPECS[name], weights).encode(inputs)
    oracle = Oracle(SPECS[name], weights)
    for tokens in requests(inputs):
        expected = oracle(inputs.input_ids[tokens], inputs.positions[tokens], inputs.types[tokens])
        found = hidden[tokens]
        cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert cosines.min() > 0.9995, tokens
        mean, other = found.mean(0), expected.mean(0)
        assert mean @ other / np.linalg.norm(mean) / np.linalg.norm(other) > 0.9999, tokens


@pytest.mark.parametrize("name", ["bert", "modern"])
def test_the_bits_of_a_request_depend_on_no_other(name: str) -> None:
    weights = weights_of(SPECS[name])
    model, alone = load(SPECS[name], weights), load(SPECS[name], weights, num_threads=1)
    for lengths in (LENGTHS, [523, *LENGTHS[::-1], 300], [64, 64, 17]):  # the second takes two passes
        inputs = batch(lengths)
        hidden = model.encode(inputs)
        for length, tokens in zip(lengths, requests(inputs), strict=True):
            np.testing.assert_array_equal(hidden[tokens], alone.encode(batch([length])))


@pytest.mark.parametrize(("activation", "gated"), ACTIVATIONS)
def test_an_activation_is_as_exact_as_its_inputs_and_outputs(activation: str, gated: bool) -> None:
    """Attention adds nothing here, and rounding of products is the only other error."""
    each = layer(0, norms=("feed_forward_norm",), activation=activation, gated=gated)
    spec = encoder([each])
    weights = weights_of(spec)
    weights["0.out.weight"] *= 0
    weights["0.up.weight" if not gated else "0.gate.weight"] *= 2
    inputs = batch([200])
    found = load(spec, weights).encode(inputs)
    expected = Oracle(spec, weights)(inputs.input_ids, inputs.positions, inputs.types)
    library = load_library()
    assert library is not None
    bounds = {"_kernels_avx512": 1e-5, "_kernels_neon": 1e-5, "_kernels_avx2": 3e-4}  # AVX2: integers of 14 bits
    assert np.abs(found - expected).max() < bounds.get(library.name, 3e-2) * np.abs(expected).max()


def test_a_pass_that_is_abandoned_raises_its_error_and_the_next_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.cpu.decoder.STOP_INTERVAL", 0.0)  # the pass may be shorter than the usual one
    model, inputs = load(SPECS["bert"], weights_of(SPECS["bert"])), batch([500] * 8)
    calls = []

    def check() -> None:
        calls.append(1)
        raise TimeoutError("abandoned")

    whole = model.encode(inputs)
    with pytest.raises(TimeoutError, match="abandoned"):
        model.encode(inputs, check)
    assert len(calls) == 1
    np.testing.assert_array_equal(model.encode(inputs), whole)


def test_sizes_that_the_library_does_not_compute_are_not_supported() -> None:
    narrow = encoder([layer(0, heads=(12, 12, 8))])
    mixed = encoder([layer(0), layer(1, activation="relu")])
    biased = encoder([layer(0, gated=True)])
    network: Any = biased.layers[0].feed_forward
    gate = replace(network, gate=replace(network.gate, bias=True))
    other = encoder([layer(0, gated=True, activation="relu")])
    for spec in (narrow, mixed, replace(biased, layers=(replace(biased.layers[0], feed_forward=gate),)), other):
        assert not CPUEncoder.supports(config_of(spec))
