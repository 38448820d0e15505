"""Where torch is not installed, what needs it says so by name, and what does not need it works."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from app.commands.doctor import NOTE, _devices
from app.config.settings import Settings
from engine.errors import ConfigError
from gpu import model_loader
from gpu.checkpoint.config import ModelConfig
from gpu.cpu.library import load_library
from gpu.model_loader import import_what_computes, resolve_device
from gpu.runner.runner import WorkerOptions

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=307,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "gpu.models.torch_model", raising=False)


def refusal(config: ModelConfig = CONFIG, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        import_what_computes(config, WorkerOptions(**{"device": "cpu", **options}))  # type: ignore[arg-type]
    assert "needs torch, which is not installed (pip install '.[torch]' in a clone of Headrace)" in str(caught.value)
    return str(caught.value)


@pytest.mark.skipif(load_library() is None, reason="the library does not run here")
def test_what_the_library_lacks_is_named() -> None:
    import_what_computes(CONFIG, WorkerOptions(device="cpu"))  # raises nothing
    assert "dtype is float32: on a CPU it needs" in refusal(dtype="float32")
    assert "model is LlamaForCausalLM: a model of this kind or shape needs" in refusal(replace(CONFIG, hidden_size=40))


def test_a_processor_without_the_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "load_library", lambda: None)
    assert "no build of the C++ library runs on this processor, so every model needs" in refusal()


def test_a_cuda_device_is_not_taken_and_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "_has_cuda_driver", lambda: True)
    assert resolve_device("auto") == "cpu"
    assert "device is cuda: it needs" in refusal(device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (found,) = _devices(Settings(device="auto"))
    assert (found.verdict, found.advice) == (NOTE, "pip install '.[torch]' in a clone")
