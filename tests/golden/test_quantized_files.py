"""What a file was quantized to is computed with as it is: every type's perplexity is that of its weights in float32.

The model is the embedded one, whose 576 inputs no block of 256 fits. It is widened with zeros to 768 hidden channels,
12 heads and 4 KV heads, so that it computes the same, and then all of its matrices are rounded to one type.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu.checkpoint import ModelConfig, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.tensors import tensor_shapes
from gpu.weights.reading import floats, read_weights
from tests.golden.test_perplexity import CODE, MAX_MODEL_LEN, PROSE, TOLERANCE, make_core, perplexity
from tests.gpu import grid_quants
from tests.gpu.checkpoint.test_hf_directory import CONFIG
from tests.gpu.checkpoint_files import TinyGGUF
from tests.gpu.k_quants import KINDS
from tests.gpu.quantized_checkpoints import FORMATS, ROUNDED, Format, Written
from tests.support.embedded_model import embedded_gguf

WIDE = 768  # a multiple of 256
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"]


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


def perplexities(model: Path) -> tuple[float, float]:
    """Return the perplexity of the file as it is served by default, and of its numbers in float32 by torch."""
    tokenizer = open_model(str(model)).tokenizer
    texts = [tokenizer.encode(text).ids for text in (PROSE, CODE)]
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


# The embedding, which is also the head, has 6 bits: files of 1 and 2 bits have such a one, too.
@pytest.mark.storm
@pytest.mark.parametrize("kind", [*KINDS, *grid_quants.KINDS, "TQ1_0", "TQ2_0", "MXFP4"])
def test_every_type_keeps_the_perplexity(write: Callable[[Callable[[str], str]], Path], kind: str) -> None:
    path = write(lambda name: kind if "layers" in name else "Q6_K")
    check_perplexities(path, kind)


@pytest.mark.storm
@pytest.mark.parametrize("name", ["bfloat16", *FORMATS])
def test_every_format_of_safetensors_keeps_the_perplexity(tmp_path: Path, name: str) -> None:
    files = open_model(str(embedded_gguf()))
    form = FORMATS.get(name, Format({}, lambda weight: Written({"weight": weight.bfloat16()}, weight)))
    tensors: dict[str, torch.Tensor] = {}
    for key, weight in read_weights(files):
        numbers = torch.from_numpy(np.array(floats(weight)))
        written = form.write(numbers).tensors if "_proj" in key else {"weight": numbers}
        tensors |= {key.removesuffix("weight") + last: tensor.contiguous() for last, tensor in written.items()}
    sizes = {key: getattr(files.config, key) for key in SIZES}
    quantization = form.config | ({"ignore": ["lm_head"]} if "ignore" in form.config else {})
    config = CONFIG | sizes | ({"quantization_config": quantization} if quantization else {})
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    files.tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file(tensors, tmp_path / "model.safetensors")
    check_perplexities(tmp_path, name)


def check_perplexities(model: Path, name: str) -> None:
    """Print a row for docs/models.md (`pytest -s -m storm`). With 906 tokens a perplexity is uncertain by 0.07 %, and
    more where a form rounds or little of the model is left."""
    served, exact = perplexities(model)
    print(f"| {name} | {exact:.2f} | {served:.2f} | {served / exact - 1:+.3%} |")
    rounds = name == "Q2_K" or any(each in name for each in ROUNDED)
    assert served == pytest.approx(exact, rel=(2 if exact < 100 and not rounds else 20) * TOLERANCE)
