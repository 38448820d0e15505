"""The library as its users have it: `from headrace import LLM, SamplingParams`."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headrace
from app.config.settings import SettingsError
from app.library import LLM, SamplingParams
from engine.errors import EngineDead
from engine.messages import EngineCoreRequest
from tests.golden.driving import fresh_core
from tests.support.interrupts import call_and_interrupt

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_example_runs_as_written() -> None:
    (example,) = re.findall(r"```python\n(from headrace import .*?)```", README.read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len([line for line in ran.stdout.splitlines() if line.strip()]) >= 2


def test_what_is_handed_out_is_the_offline_engine() -> None:
    assert (headrace.LLM, headrace.SamplingParams) == (LLM, SamplingParams)


@pytest.mark.slow
def test_what_is_left_open_is_sampled_as_the_models_authors_recommend() -> None:
    authors = LLM("smollm2-135m-instruct", progress=False).get_default_sampling_params()
    assert authors == SamplingParams(temperature=0.2, top_p=0.9)
    neutral = LLM("smollm2-135m-instruct", progress=False, sampling_defaults="openai").get_default_sampling_params()
    assert neutral == SamplingParams()


@pytest.mark.slow
def test_after_interrupts_every_answer_is_that_of_a_new_object() -> None:
    """The interrupt may also come inside the C library, which calls the abort check now and then."""
    llm, draw = LLM("smollm2-135m-instruct", progress=False, max_model_len=512), random.Random(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = ["The sea is", "Once upon a time " * 12]
    expected = [each.choices[0].token_ids for each in llm.generate(prompts, sampling, progress=False)]
    began = time.monotonic()
    assert [each.choices[0].token_ids for each in llm.generate(prompts, sampling, progress=False)] == expected
    seconds = time.monotonic() - began
    num_interrupted = 0
    for _ in range(25):
        call = partial(llm.generate, prompts[::-1], sampling, progress=False)
        came, was_interrupted = call_and_interrupt(call, draw.random() * seconds)
        assert came == was_interrupted
        num_interrupted += was_interrupted
        again = [each.choices[0].token_ids for each in llm.generate(prompts, sampling, progress=False)]
        assert again == expected
        llm.core.scheduler.check_integrity()
        assert not llm.core.has_work
    assert num_interrupted > 2  # how many depends on what else the machine does


@pytest.mark.slow
def test_an_interrupt_within_the_c_library_is_not_lost() -> None:
    """Run the steps on the main thread, like a program that drives a core by hand."""
    llm = LLM("smollm2-135m-instruct", progress=False, max_model_len=2048)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    seconds, num_interrupted = 0.0, 0
    for number in range(8):
        core = fresh_core(llm.core, max_num_batched_tokens=2000, target_inter_token_latency=60.0)
        prompt = [number, *range(100, 1800)]
        core.add(
            EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0)
        )
        began = time.monotonic()
        if number == 0:
            core.step()
            seconds = time.monotonic() - began
            continue
        came, was_interrupted = call_and_interrupt(partial(core.step, lambda _: False), seconds * number / 16)
        assert came == was_interrupted
        num_interrupted += was_interrupted
        if was_interrupted:
            with pytest.raises(EngineDead):
                core.step()
    assert num_interrupted > 2


@pytest.mark.slow
def test_threads_share_an_object(smollm2: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    texts = ["The sea is", "The sky is", "One, two,"]
    alone = [smollm2.generate(text, sampling, progress=False)[0].choices[0].text for text in texts]
    with ThreadPoolExecutor(len(texts)) as threads:
        together = threads.map(lambda text: smollm2.generate(text, sampling, progress=False), texts)
        assert [results[0].choices[0].text for results in together] == alone


@pytest.mark.slow
def test_log_probabilities_of_the_prompt_come_with_the_result(smollm2: LLM) -> None:
    sampling = [SamplingParams(max_tokens=2, prompt_logprobs=1, n=2, seed=1), SamplingParams(max_tokens=2)]
    asked, unasked = smollm2.generate(["The capital of France", "The capital of France"], sampling, progress=False)
    assert [entry.token_id for entry in asked.prompt_logprobs or []] == asked.prompt_token_ids[1:]
    assert all(len(entry.top) == 1 for entry in asked.prompt_logprobs or [])
    assert unasked.prompt_logprobs is None


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_is_shown_only_when_asked_for(
    smollm2: LLM, progress: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    smollm2.generate(["one"], SamplingParams(max_tokens=2), progress=progress)
    captured = capsys.readouterr()
    assert ("tok/s" in captured.out + captured.err) is progress


def test_a_setting_that_does_not_exist_or_is_out_of_range_is_named() -> None:
    with pytest.raises(SettingsError, match="max_num_seqs"):
        LLM("smollm2-135m-instruct", max_num_seqs=0)
    servers: dict[str, Any] = {"engine": "process", "default_timeout": 5, "max_queue_time": 5, "port": 8000}
    for name, value in servers.items():
        with pytest.raises(SettingsError, match=f"^{name}: only a server reads this setting"):
            LLM("smollm2-135m-instruct", **{name: value})
    with pytest.raises(SettingsError, match="max_num_sequences"):
        LLM("smollm2-135m-instruct", max_num_sequences=4)
