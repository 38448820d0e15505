"""What a file was quantized to is computed with as it is: every type's perplexity is that of its weights in float32.

The model is the embedded one, whose 576 inputs no block of 256 fits. It is widened with zeros to 768 hidden channels,
12 heads and 4 KV heads, so that it computes the same, and then all of its matrices are rounded to one type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu.checkpoint import ModelConfig, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.tensors import tensor_shapes
from gpu.weights.reading import floats, read_weights
from tests.golden.test_perplexity import CODE, MAX_MODEL_LEN, PROSE, TOLERANCE, make_core, perplexity
from tests.gpu.checkpoint_files import TinyGGUF
from tests.gpu.k_quants import KINDS
from tests.support.embedded_model import embedded_gguf

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
WIDE = 768  # a multiple of 256


def widened() -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Zeros change nothing, but for the mean of squares that norms divide by."""
    files = open_model(str(embedded_gguf()))
    ratio = files.config.hidden_size / WIDE
    config = dataclasses.replace(
        files.config,
        hidden_size=WIDE,
        num_attention_heads=12,
        num_key_value_heads=4,
        rms_norm_eps=files.config.rms_norm_eps * ratio,
    )
    shapes, weights = tensor_shapes(config), {}
    for name, weight in read_weights(files):
        numbers = floats(weight) * (math.sqrt(ratio) if len(weight.shape) == 1 else 1.0)
        wanted = shapes[name]
        weights[name] = np.pad(numbers, [(0, after - now) for now, after in zip(numbers.shape, wanted, strict=True)])
    return config, weights


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str | Callable[[str], str]], Path]]:
    """Writes the model with its matrices in a type, or each in its own."""
    config, weights = widened()
    metadata = GGUFFile(embedded_gguf()).metadata
    path = tmp_path_factory.mktemp("files") / "model.gguf"

    def write(kind: str | Callable[[str], str]) -> Path:
        file = TinyGGUF(path, config)
        tokens, types, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
        file.add_tokenizer(pre=metadata["tokenizer.ggml.pre"], tokens=tokens, types=types, merges=merges)
        return file.add_weights(weights, kind).save()

    yield write
    path.unlink(missing_ok=True)


def perplexities(model: Path, more: str = "") -> tuple[float, float]:
    """As the file is served by default, and of its numbers in float32 by torch. `more` goes in pieces of 500 tokens."""
    tokenizer = open_model(str(model)).tokenizer
    texts = [tokenizer.encode(text).ids for text in (PROSE, CODE)]
    rest = tokenizer.encode(more).ids
    texts += [rest[start : start + 500] for start in range(0, len(rest), 500)]
    found = []
    for dtype in ("auto", "float32"):
        core = make_core(dtype, model)
        found.append(perplexity(core, texts, MAX_MODEL_LEN))
        core.shutdown()
    return found[0], found[1]


@pytest.mark.slow
def test_all_types_side_by_side_keep_the_perplexity(write: Callable[[Callable[[str], str]], Path]) -> None:
    def kind(name: str) -> str:
        """A type for each layer, in turns."""
        _, group, number, *_ = name.split(".")
        return KINDS[int(number) % len(KINDS)] if group == "layers" else "Q6_K"

    served, exact = perplexities(write(kind))
    assert served == pytest.approx(exact, rel=TOLERANCE)
    assert 14 < exact < 20


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_keeps_the_perplexity(write: Callable[[str], Path], kind: str) -> None:
    # With 906 tokens the figure of Q4_0 is uncertain by 0.07 %, which is too much for a bound of 0.1 %.
    served, exact = perplexities(write(kind), LICENSE.read_text())
    print(f"| {kind} | {exact:.3f} | {served:.3f} | {served / exact - 1:+.3%} |")
    assert served == pytest.approx(exact, rel=TOLERANCE)
