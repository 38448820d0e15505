"""The library as a program uses it: what is drawn in its terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from app.library import LLM, generating
from engine.messages import SamplingParams
from tests.support.tiny_model import write_tiny_model


def test_no_bar_is_drawn_where_none_was_wanted_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(count: int) -> AbstractContextManager[object]:
        drawn.append(count)
        return generating(count)

    monkeypatch.setattr("app.library.generating", draw)
    model = write_tiny_model(tmp_path / "tiny", vocab_size=2048)
    llm = LLM(str(model), progress=False, load_format="dummy", kv_cache_memory="4MiB", max_model_len=64)
    sampling = SamplingParams(max_tokens=1)
    llm.generate("a", sampling)
    assert drawn == []
    llm.generate(["a", "b"], sampling, progress=True)
    assert drawn == [2]
