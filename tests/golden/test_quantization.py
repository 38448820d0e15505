"""A model in bfloat16 that a real server rounds to 8 or 4 bits when it loads it: it says what the rounded weights say.

The judge is transformers with those weights in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu.checkpoint import ModelFiles, QuantizedRows, open_model
from gpu.cpu.library import load_library
from gpu.weights.quantization import Quantization
from gpu.weights.reading import read_weights
from loadtest.export_model import export_model
from tests.golden.oracle import Oracle
from tests.golden.test_perplexity import PROSE
from tests.support.embedded_model import embedded_gguf
from tests.support.harness import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_library() is None, reason="only the library computes with quantized weights"),
    pytest.mark.timeout(400),
]

FORMS = {"int8": "8-bit, bfloat16 weights", "int4": "4-bit, 8-bit weights"}
LOST = {"int8": 0.005, "int4": 0.15}  # of the perplexity of bfloat16, at most
TOLERANCE = 0.003  # of one text of 450 tokens; of more, a third of it
PROMPTS = ("The capital of France is", "A mill needs water because", "def add(a, b):\n")
TIE = 0.02  # nats between two tokens that rounding activations to bfloat16 may let change places
KEY = "admin-key"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shuffled, because the file's weights lie on a grid of 4 bits, which rounding would find again."""
    return export_model(open_model(str(embedded_gguf())), tmp_path_factory.mktemp("bfloat16") / "model", shuffle=True)


@pytest.fixture(scope="module", params=["int8", pytest.param("int4", marks=pytest.mark.storm)])
def served(
    request: pytest.FixtureRequest, exported: Path, smollm2_oracle: Oracle
) -> Iterator[tuple[str, Server, Oracle]]:
    """The form, a server of it, and the same weights in float32."""
    with Server(model=exported, dtype="auto", quantization=request.param, num_threads=2, admin_keys=KEY) as server:
        files = open_model(str(exported))
        model = LlamaForCausalLM(cast(LlamaConfig, smollm2_oracle.model.config)).eval()
        model.load_state_dict(_dequantized(files, request.param), strict=False, assign=True)
        model.tie_weights()
        yield request.param, server.wait_ready(), Oracle(model)


def _dequantized(files: ModelFiles, how: str) -> dict[str, torch.Tensor]:
    """Norms and what is left as it is are bfloat16 in the file."""
    return {
        name: torch.from_numpy(weight.dequantize())
        if isinstance(weight, QuantizedRows)
        else torch.from_numpy(weight).view(torch.bfloat16).float()
        for name, weight in Quantization(how, files.config).applied_to(read_weights(files))
    }


def _perplexity(logprobs: list[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def test_greedy_tokens_are_those_of_the_rounded_weights(served: tuple[str, Server, Oracle], exported: Path) -> None:
    _, server, oracle = served
    tokenizer = open_model(str(exported)).tokenizer
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    choices = server.complete(prompts, max_tokens=16, return_token_ids=True)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        said = choice["token_ids"]
        likely = oracle.logprobs(prompt, said)
        behind = likely.amax(-1) - likely.gather(1, torch.tensor(said)[:, None]).flatten()
        assert behind.max() < TIE, f"of {said}"


def test_perplexity_is_that_of_the_rounded_weights_and_hardly_more_than_bfloat16s(
    served: tuple[str, Server, Oracle], smollm2_oracle: Oracle, exported: Path
) -> None:
    how, server, oracle = served
    ids = open_model(str(exported)).tokenizer.encode(PROSE).ids
    answer = server.complete(ids, max_tokens=1, prompt_logprobs=0)
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    seen = _perplexity([next(iter(entry.values()))["logprob"] for entry in entries])
    exact, before = (
        _perplexity(judge.logprobs(ids[:1], ids[1:]).gather(1, torch.tensor(ids[1:])[:, None]).flatten().tolist())
        for judge in (oracle, smollm2_oracle)
    )
    assert seen == pytest.approx(exact, rel=TOLERANCE)
    assert seen == pytest.approx(before, rel=LOST[how])


def test_the_log_and_the_server_info_tell_what_was_done(served: tuple[str, Server, Oracle]) -> None:
    how, server, _ = served
    (line,) = (line for line in server.log.splitlines() if "quantized to" in line)
    assert FORMS[how] in line
    told = re.search(rf"quantized to {how}: ([0-9.]+)% off.*perplexity ([0-9.]+) over (\d+) tokens", line)
    assert told is not None
    error, perplexity, count = map(float, told.groups())
    assert error == pytest.approx({"int8": 0.55, "int4": 6.6}[how], rel=0.05)
    assert perplexity == pytest.approx({"int8": 44.9, "int4": 50.1}[how], rel=0.05)
    assert count > 150
    info = server.client.get("/server_info", headers={"authorization": f"Bearer {KEY}"}).json()
    assert info["settings"]["quantization"] == how
