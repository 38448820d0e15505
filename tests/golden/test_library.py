"""The library as its users have it: `from headrace import LLM, SamplingParams`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from app.offline import LLM
from app.settings import SettingsError
from engine.messages import SamplingParams

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_example_runs_as_written() -> None:
    (example,) = re.findall(r"```python\n(from headrace import .*?)```", README.read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len([line for line in ran.stdout.splitlines() if line.strip()]) >= 2


def test_what_is_handed_out_is_the_offline_engine() -> None:
    assert (headrace.LLM, headrace.SamplingParams) == (LLM, SamplingParams)


def test_what_is_left_open_is_sampled_as_the_models_authors_recommend() -> None:
    authors = LLM("smollm2-135m-instruct", progress=False).get_default_sampling_params()
    assert authors == SamplingParams(temperature=0.2, top_p=0.9)
    neutral = LLM("smollm2-135m-instruct", progress=False, sampling_defaults="openai").get_default_sampling_params()
    assert neutral == SamplingParams()


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
    with pytest.raises(SettingsError, match="max_num_sequences"):
        LLM("smollm2-135m-instruct", max_num_sequences=4)
