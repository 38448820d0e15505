"""The setting `quantization`: unquantized weights of a checkpoint are rounded while they are read.

Each block of 32 inputs gets a scale and becomes a block of GGUF's Q8_0 for int8, or Q4_1 for int4, with which the C++
library computes. Norms and biases are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig, QuantizedRows
from gpu.checkpoint.architecture import AttentionSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import Weight
from gpu.weights.reading import floats

BLOCK = 32
_AT_ONCE = 2**17  # weights at a time, so that intermediate results stay in the processor's cache
_FITS = 3  # fits of scale and offset to the rounded numbers; more fits change perplexity by a thousandth

Floats = NDArray[np.float32]


class _Form(NamedTuple):
    type: str  # GGUF's name
    block_bytes: int
    # [32, n] -> the bytes of n blocks, and the numbers that they stand for.
    round: Callable[[Floats], tuple[list[NDArray[np.uint8]], Floats]]


class Quantization:
    """The rounding of one model's weights, and its error."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        """`name` is "int8" or "int4".

        The matrices that perplexity depends on most get the next finer form: for int8 embedding and head (SmolLM2's
        perplexity rises by 0.1 % instead of 0.3 %), for int4 also keys and values (11 % instead of 26 %).
        """
        spec = spec_of(config)
        self.name = name
        self._form = _Q8_0 if name == "int8" else _Q4_1
        self._finer_form = None if name == "int8" else _Q8_0
        finer = [part for part in (spec.embedding, spec.head) if part is not None]
        if name == "int4":
            attentions = (layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec))
            finer += [part for attention in attentions for part in attention.qkv[1:]]
        self._finer = {part.weight_name for part in finer}
        self._squares = self._squared_errors = 0.0

    @property
    def relative_error(self) -> float:
        """The root mean square error of all rounded weights, divided by the root mean square of the weights."""
        return float(np.sqrt(self._squared_errors / self._squares)) if self._squares else 0.0

    def applied_to(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield the weights, rounded, one at a time. Raises ConfigError for a weight that is already quantized."""
        for name, weight in weights:
            if not isinstance(weight, np.ndarray):
                kind = weight.type if isinstance(weight, QuantizedRows) else "a quantized type"
                raise ConfigError(
                    "quantization",
                    self.name,
                    allowed=f"it needs weights in 16 or 32 bits, and {name} of this model has {kind} already",
                    hint="quantization=none works",
                )
            form = self._finer_form if name in self._finer else self._form
            fits = weight.ndim == 2 and weight.shape[1] % BLOCK == 0
            yield name, weight if form is None or not fits else self._rounded(weight, form)

    def _rounded(self, weight: NDArray, form: _Form) -> QuantizedRows:
        rows, cols = weight.shape
        packed = np.empty((rows, cols // BLOCK, form.block_bytes), dtype=np.uint8)
        count = max(1, _AT_ONCE // cols)
        for start in range(0, rows, count):
            part = packed[start : start + count].reshape(-1, form.block_bytes)
            # Transposed, with the i-th weights of all blocks in row i: sums over a block are sums of rows.
            numbers = np.ascontiguousarray(floats(weight[start : start + count]).reshape(-1, BLOCK).T)
            with np.errstate(invalid="ignore", over="ignore"):  # weights that are not finite stay so
                fields, kept = form.round(numbers)
                np.concatenate(fields, axis=1, out=part)
                self._squared_errors += float(np.square(kept - numbers).sum())
                self._squares += float(np.square(numbers).sum())
        return QuantizedRows(form.type, (rows, cols), packed.reshape(rows, -1))


def _round_to_q8_0(numbers: Floats) -> tuple[list[NDArray[np.uint8]], Floats]:
    """Round blocks to d * q: scale d, integer q from -127 to 127."""
    size = np.maximum(numbers.max(0), -numbers.min(0)) / np.float32(127)
    d = size.astype(np.float16)
    d = np.where(d < size, np.nextafter(d, np.float16(np.inf)), d)  # so that no q is beyond 127
    step = d.astype(np.float32)
    q = np.rint(numbers / np.where(step > 0, step, np.float32(1)))
    return [_bytes(d), q.astype(np.int8).view(np.uint8).T], step * q


def _round_to_q4_1(numbers: Floats) -> tuple[list[NDArray[np.uint8]], Floats]:
    """Round blocks to d * q + m: scale d, offset m, integer q from 0 to 15.

    At first d and m span the range of the weights. Then fits alternate: d and m to q with the least square error, and q
    to d and m by rounding.
    """
    least = numbers.min(0)
    d, m, q = _levels(numbers, (numbers.max(0) - least) / np.float32(15), least)
    for _ in range(_FITS):
        d, m, q = _levels(numbers, *_fitted(numbers, q))
    nibbles = q.astype(np.uint8)
    kept = d.astype(np.float32) * q + m.astype(np.float32)
    return [_bytes(d), _bytes(m), (nibbles[:16] | nibbles[16:] << np.uint8(4)).T], kept


def _levels(numbers: Floats, d: Floats, m: Floats) -> tuple[NDArray[np.float16], NDArray[np.float16], Floats]:
    """Return d and m in float16, and the nearest q for them."""
    kept_d, kept_m = d.astype(np.float16), m.astype(np.float16)
    step = kept_d.astype(np.float32)
    q = numbers - kept_m.astype(np.float32)
    q /= np.where(step > 0, step, np.float32(1))
    return kept_d, kept_m, np.clip(np.rint(q, out=q), 0, 15, out=q)


def _fitted(numbers: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Return slope and offset of the line of least squares through the points (q, number) of each block."""
    mean_q, mean = q.mean(0), numbers.mean(0)
    apart = q - mean_q
    spread = np.square(apart).sum(0)
    d = (apart * numbers).sum(0) / np.where(spread > 0, spread, np.float32(1))
    return d, mean - d * mean_q


def _bytes(halves: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)


_Q8_0 = _Form("Q8_0", 34, _round_to_q8_0)
_Q4_1 = _Form("Q4_1", 20, _round_to_q4_1)
