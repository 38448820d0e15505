"""A model that costs nothing to load or to run, for tests of what surrounds the model.

Its weights are random, so its texts mean nothing, but they are the same in every run; its tokenizer is the embedded
model's, so that requests look like real ones.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu.checkpoint import open_model
from tests.support.harness import MODEL, REPOSITORY, Server

NAME = "tiny"
VOCABULARY = 49152
CONTEXT = 8192  # tokens
LONG_CONTEXT = 262_144
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(directory: Path, **changes: object) -> Path:
    """A Hugging Face directory without weights, to be loaded with `load_format="dummy"`.

    With a smaller `vocab_size`, its tokenizer is the embedded model's as far as it goes: a second less at each start.
    """
    config = CONFIG | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(_tokenizer(config["vocab_size"]))
    return directory


def tiny_server(worker_class: str = "uvloop", **settings: object) -> Server:
    """A server of the tiny model, not started yet."""
    return Server(worker_class, **tiny_settings(**settings))


def tiny_settings(**settings: object) -> dict[str, object]:
    """What such a server is started with."""
    usual = {
        "model": settings["model"] if "model" in settings else write_tiny_model(Path(_home().name) / NAME),
        "load_format": "dummy",
        "max_model_len": CONTEXT,
        "kv_cache_memory": "16MiB",
        "max_num_seqs": 16,
    }
    return usual | settings


def deployed_tiny_server(worker_class: str = "uvloop", **settings: object) -> Server:
    """A server of the tiny model with the context it is told, under the configuration that is shipped for Hypercorn."""
    context = settings.get("max_model_len", CONTEXT)
    model = write_tiny_model(Path(_home().name) / f"{NAME}-{context}", max_position_embeddings=context)
    usual = {"model": model, "load_format": "dummy", "kv_cache_memory": "48MiB"}
    return _DeployedServer(worker_class, **(usual | settings))


class _DeployedServer(Server):
    def command(self) -> list[str]:
        module, *arguments = super().command()
        return [module, "--config", str(REPOSITORY / "deploy" / "hypercorn.toml"), *arguments]


@cache
def _home() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headrace-tiny-")


@cache
def _tokenizer(vocab_size: int) -> str:
    tokenizer = json.loads(open_model(MODEL).tokenizer.to_str())
    known = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < vocab_size}
    merges = [pair for pair in tokenizer["model"]["merges"] if {*pair, "".join(pair)} <= known.keys()]
    tokenizer["model"] |= {"vocab": known, "merges": merges}
    return json.dumps(tokenizer)
