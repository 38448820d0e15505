"""What a model's authors recommend to sample with is read from whatever file tells it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gpu.checkpoint import open_model
from tests.gpu.checkpoint.test_hf_directory import CONFIG
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.embedded_model import embedded_gguf


def hf_sampling(folder: Path, **values: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(values))
    return open_model(str(folder), load_format="dummy").sampling


def gguf_sampling(folder: Path, **values: float) -> Any:
    file = TinyGGUF(folder / "m.gguf")
    for name, value in values.items():
        add = file.writer.add_int32 if isinstance(value, int) else file.writer.add_float32
        add(f"general.sampling.{name}", value)
    return open_model(str(file.add_weights(random_weights(TINY)).save())).sampling


def test_a_generation_config_is_read_as_vllm_reads_it(tmp_path):
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    told |= {"presence_penalty": 1.5, "frequency_penalty": -1}
    others = {"do_sample": True, "max_length": 20, "eos_token_id": 2, "num_beams": 4, "typical_p": None}
    assert hf_sampling(tmp_path, **told, max_new_tokens=2048, **others) == told | {"max_tokens": 2048}
    assert hf_sampling(tmp_path, temperature=None, top_k=-1) == {"top_k": 0}
    assert hf_sampling(tmp_path) == {}


def test_a_gguf_file_is_read_under_llama_cpps_names(tmp_path):
    told = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05, "mirostat": 2}
    # In the digits that were meant, not in those that 32 bits leave.
    assert gguf_sampling(tmp_path, **told) == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    assert gguf_sampling(tmp_path) == {}


def test_the_embedded_models_authors_recommend_cool_sampling():
    assert open_model("embedded", cache_dir=embedded_gguf().parent).sampling == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("temperature", 7, "a number from 0 to 2"),
        ("temperature", "hot", "a number from 0 to 2"),
        ("temperature", float("nan"), "a number from 0 to 2"),
        ("top_p", 0, "a number from 1e-06 to 1"),
        ("top_k", -2, "an integer from 0 to 2,147,483,647"),
        ("top_k", 0.5, "an integer from 0 to 2,147,483,647"),
        ("min_p", True, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number from 0.001 to 1000"),
        ("presence_penalty", [1], "a number from -2 to 2"),
        ("max_new_tokens", 0, "an integer from 1 to"),
    ],
)
def test_what_no_request_could_ask_for_is_ignored_and_named(tmp_path, caplog, key, value, allowed):
    with caplog.at_level(logging.WARNING):
        sampling = hf_sampling(tmp_path, **{"temperature": 0.5, "top_p": 0.5, key: value})
    name = {"max_new_tokens": "max_tokens"}.get(key, key)
    assert name not in sampling
    assert sampling
    (warning,) = caplog.messages
    assert "generation_config.json: " in warning
    assert f"{key} must be {allowed}" in warning
    assert "is ignored" in warning


def test_a_gguf_files_wrong_value_is_ignored_and_named(tmp_path, caplog):
    assert gguf_sampling(tmp_path, temp=-1.0, top_k=5) == {"top_k": 5}
    assert "general.sampling.temp must be a number from 0 to 2, got -1.0" in caplog.text
