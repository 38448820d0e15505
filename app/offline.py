"""The library: a model by its name, without a server.

from headrace import LLM, SamplingParams

llm = LLM()  # the embedded model; or LLM("path/to/model.gguf", max_model_len=2048)
for result in llm.generate(["The sea is", "The sky is"], SamplingParams(max_tokens=16)):
    print(result.choices[0].text)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import msgspec

import engine.frontend.llm
from app.loading import core_factory, default_sampling, open_files
from app.progress import generating, loading
from app.setting_sources import load_settings
from app.settings import Settings, SettingsError
from engine.frontend.llm import Generation
from engine.frontend.shared_engine import OnStep
from engine.messages import SamplingParams

_NAMES = list(Settings.model_fields)
SERVER_SETTINGS = frozenset(_NAMES[_NAMES.index("host") :]) | {
    *("engine", "served_model_name", "check_model_name", "tool_parser", "reasoning_parser"),
}
"""Settings that only a server reads."""


class LLM(engine.frontend.llm.LLM):
    """A loaded model. Threads may share it: calls of `generate` that overlap run together, as one batch."""

    def __init__(self, model: str | None = None, *, progress: bool = True, **settings: Any) -> None:
        """Fetch the model where it is missing, and load it. `settings` are those of the server, by name; what is not
        given comes from the environment and the settings file, as for the server.

        Raises SettingsError naming the setting, and ModelError for files that cannot be run.
        """
        if useless := [name for name in settings if name in SERVER_SETTINGS]:
            raise SettingsError(f"{useless[0]}: only a server reads this setting, and an LLM has none; leave it out")
        given = settings if model is None else settings | {"model": model}
        self._open(load_settings(given, spelled=str), progress)

    @classmethod
    def of(cls, settings: Settings, *, progress: bool = True) -> Self:
        """Load the model with complete settings: the environment and the settings file are not read again."""
        llm = cls.__new__(cls)
        llm._open(settings, progress)
        return llm

    def _open(self, chosen: Settings, progress: bool) -> None:
        self._progress = progress
        if chosen.data_parallel_size > 1:
            raise SettingsError(f"data_parallel_size: got {chosen.data_parallel_size}; an LLM is one engine. 1 works")
        with loading() if progress else nullcontext() as report:
            files = open_files(chosen, report)
            core = core_factory(chosen, files)()
            sampling = msgspec.convert(default_sampling(chosen, files), SamplingParams)
        super().__init__(core, files.tokenizer, seed=chosen.seed, default_sampling=sampling)
        weakref.finalize(self, self._engine.close)  # garbage collection ends no worker process

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Generate as the engine's `LLM` does, with a progress bar in the terminal. `on_step` and `progress=False`,
        here or when the model was loaded, turn the bar off."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        wanted = self._progress if progress is None else progress
        bar = generating(len(prompts)) if wanted and on_step is None else nullcontext(on_step)
        with bar as report:
            return super().generate(prompts, sampling, on_step=report)
