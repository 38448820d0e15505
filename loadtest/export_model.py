"""A model as a Hugging Face directory in bfloat16, so that servers which read no GGUF serve the same weights.

    python -m loadtest.export_model DIR [--model NAME]

Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and chat_template.jinja. The weights are
those that Headrace reads: dequantized to float32 and rounded once to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu.checkpoint import EMBEDDED_MODEL, ModelConfig, ModelFiles, open_model


def export_model(files: ModelFiles, directory: Path) -> Path:
    """Write all of `files` to `directory`, which is made if need be, and return it."""
    import torch
    from safetensors.torch import save_file

    from gpu.weights.tensors import weights_of

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(files.config), indent=2))
    write_tokenizer(files, directory)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(files)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


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
    options = parser.parse_args()
    print(export_model(open_model(options.model), options.directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
