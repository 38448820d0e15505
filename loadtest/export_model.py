"""A model as a Hugging Face directory in bfloat16, so that servers which read no GGUF serve the same weights.

    python -m loadtest.export_model DIR [--model NAME] [--shuffled]

Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and chat_template.jinja. The weights are
those that Headrace reads: dequantized to float32 and rounded once to bfloat16.

Rounded to blocks of 32 once more, weights that come from blocks of 32 lose next to nothing, because a block has as many
different numbers as it may have. `--shuffled` puts the channels in another order, everywhere in the same, so that other
weights make up a block. The model computes the same, and what rounding costs it is what it costs any model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.checkpoint import EMBEDDED_MODEL, ModelConfig, ModelFiles, open_model

if TYPE_CHECKING:
    import torch


def export_model(files: ModelFiles, directory: Path, *, shuffle: bool = False) -> Path:
    """Write all of `files` to `directory`, which is made if need be, and return it."""
    import torch
    from safetensors.torch import save_file

    from gpu.weights.tensors import weights_of

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(files.config), indent=2))
    write_tokenizer(files, directory)
    tensors = shuffled(weights_of(files), files.config) if shuffle else weights_of(files)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shuffled(weights: Iterable[tuple[str, torch.Tensor]], config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The same model with its hidden channels, those inside its MLPs and those of its values in another order."""
    import torch

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(size))

    hidden, inner, value = order(config.hidden_size), order(config.intermediate_size), order(config.head_dim)
    values, attended = (
        (torch.arange(heads)[:, None] * config.head_dim + value).flatten()
        for heads in (config.num_key_value_heads, config.num_attention_heads)
    )
    orders: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {  # of outputs, of inputs
        **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), (hidden, None)),
        **dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "k_proj"), (None, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        "down_proj": (hidden, inner),
        "v_proj": (values, hidden),
        "o_proj": (hidden, attended),
    }
    for name, tensor in weights:
        rows, columns = orders.get(name.split(".")[-2], (None, None))  # not of norms of queries and keys
        moved = tensor if rows is None else tensor.index_select(0, rows)
        yield name, moved if columns is None or tensor.ndim == 1 else moved.index_select(1, columns)


def write_tokenizer(files: ModelFiles, directory: Path) -> None:
    """The tokenizer, its special tokens and the chat template, as transformers and vLLM look for them."""
    (directory / "tokenizer.json").write_text(files.tokenizer.to_str())
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    if files.chat_template is not None:
        (directory / "chat_template.jinja").write_text(files.chat_template)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The content of config.json for weights in bfloat16."""
    if config.rope_scaling is not None or config.sliding_window is not None:
        raise NotImplementedError("scaled rotary embeddings and windows are not written")
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as for `headrace serve`. Default: the embedded one")
    parser.add_argument("--shuffled", action="store_true", help="the same model with its channels in another order")
    options = parser.parse_args()
    print(export_model(open_model(options.model), options.directory, shuffle=options.shuffled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
