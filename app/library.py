"""`LLM`: a model by its name, without a server.

from headrace import LLM, SamplingParams

llm = LLM()  # the embedded model; or LLM("path/to/model.gguf", max_model_len=2048)
for result in llm.generate(["The sea is", "The sky is"], SamplingParams(max_tokens=16)):
    print(result.choices[0].text)
(answer,) = llm.chat([{"role": "user", "content": "What is a headrace?"}])
(vector,) = llm.embed("The sea is")
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import msgspec

import engine.frontend.llm
from app.config.settings import Settings, SettingsError
from app.config.sources import load_settings
from app.serving.loading import core_factory, default_sampling, open_files
from engine.errors import InvalidRequest
from engine.frontend.llm import Generation
from engine.frontend.shared_engine import OnStep
from engine.messages import SPECIAL_MARK, Pooling, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from app.serving.prompts import PromptEncoder
    from gpu.checkpoint import Progress


_NAMES = list(Settings.model_fields)
SERVER_SETTINGS = frozenset(_NAMES[_NAMES.index("models") :]) | {
    *("engine", "served_model_name", "check_model_name"),
}
"""The settings that only a server reads."""


class LLM(engine.frontend.llm.LLM):
    """A loaded model. Threads may share it: calls of `generate` that overlap run together, as one batch."""

    def __init__(self, model: str | None = None, *, progress: bool = True, **settings: Any) -> None:
        """Fetch the model if it is missing, and load it. `settings` are the server's, by name; the others come from the
        environment and the settings file, as for the server.

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
            raise SettingsError(f"data_parallel_size: got {chosen.data_parallel_size}; LLM runs one engine; set 1")
        with loading() if progress else nullcontext() as report:
            files = open_files(chosen, report)
            core = core_factory(chosen, files)()
            sampling = msgspec.convert(default_sampling(chosen, files), SamplingParams)
        super().__init__(core, files.tokenizer, seed=chosen.seed, default_sampling=sampling)
        weakref.finalize(self, self._engine.close)  # garbage collection alone would leave worker processes
        self._settings, self._files = chosen, files

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
        progress: bool | None = None,
        begins_message: bool = False,
        pooling: Pooling | None = None,
    ) -> list[Generation]:
        """Generate as the engine's `LLM` does, with a progress bar in the terminal. `on_step` and `progress=False`,
        here or when the model was loaded, turn the bar off."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        wanted = self._progress if progress is None else progress
        bar = generating(len(prompts)) if wanted and on_step is None else nullcontext(on_step)
        with bar as report:
            return super().generate(prompts, sampling, on_step=report, begins_message=begins_message, pooling=pooling)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[Generation]:
        """Answer a conversation, or each of a list of conversations, as `generate` completes prompts.

        Messages and tools have the form of the chat API. The text of an answer is what the model writes, with its
        reasoning and calls. `use_tqdm` is the `progress` of `generate`. Raises InvalidRequest, which names the field.
        """
        from protocol.body import validate
        from protocol.errors import ApiError
        from protocol.openai.chat import ChatCompletionRequest
        from protocol.syntax.reasoning import PROMPT_TAIL

        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        more: dict[str, Any] = {"tools": list(tools or ()), "chat_template_kwargs": dict(chat_template_kwargs or {})}
        more |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        prompts: list[str | list[int]] = []
        per_prompt: list[SamplingParams] = []
        sampling_of_each = self._per_prompt(sampling_params, len(conversations))
        for conversation, sampling in zip(conversations, sampling_of_each, strict=True):
            try:
                body = validate(ChatCompletionRequest, {"messages": list(conversation), **more})
            except ApiError as error:
                raise InvalidRequest(error.message, param=error.param) from None
            prompt = self._encoder.encode_chat_here(body, self.core.config.max_model_len)
            end = b"".join(map(self._vocabulary.token_bytes, prompt[-PROMPT_TAIL:]))
            prompts.append(prompt)
            per_prompt.append(body.with_syntax(sampling, self._encoder.syntax, end))
        begins = not continue_final_message
        answers = self.generate(prompts, per_prompt, progress=use_tqdm, begins_message=begins)
        for choice in (choice for answer in answers for choice in answer.choices):
            choice.text = choice.text.replace(SPECIAL_MARK, "")  # the mark of special tokens that are tags
        return answers

    def embed(
        self,
        prompts: str | Sequence[str | list[int]],
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return the vector of every prompt, text or token ids, as `/v1/embeddings` does: `pooling` is mean or last, by
        default the model's. Raises InvalidRequest."""
        from protocol.openai.embeddings import EmbeddingRequest, finished_vector

        given: Any = [prompts] if isinstance(prompts, str) else list(prompts)
        config, embedder = self._files.config, self._files.embedder
        fields: Any = {"prompt_name": prompt_name, "dimensions": dimensions, "pooling": pooling}
        asked = EmbeddingRequest.model_construct(input=given, **fields)
        inputs = asked.inputs(config.vocab_size, embedder.prompts, embedder.default_prompt) if given else []
        asked.check_dimensions(config.embedding_size)
        if not embedder.pools_prompt and asked.prompt(embedder.prompts, embedder.default_prompt):
            raise InvalidRequest(
                "prompt_name: this model leaves the prompt out of the mean, which only a server does.",
                param="prompt_name",
            )
        kind = asked.kind(embedder.pooling or "mean", is_encoder=config.encoder is not None)
        nothing = SamplingParams(max_tokens=0)
        found = self.generate(inputs, nothing, progress=use_tqdm, pooling=kind)
        return [finished_vector(each.choices[0].hidden_state or b"", dimensions, normalize) for each in found]

    @cached_property
    def _encoder(self) -> PromptEncoder:
        from app.serving.prompts import open_prompts

        encoder = open_prompts(self._settings, self._files)
        weakref.finalize(self, encoder.close)
        return encoder


# ------------------------------------------------------------------------------------------------------------- progress
# Progress bars in a terminal, for fetching and loading a model and for generating.


@contextmanager
def loading() -> Iterator[Progress]:
    """Show slow steps as bars in a terminal, and as one line per step elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
                if not console.is_terminal:
                    print(phase, file=sys.stderr)
            bars.update(tasks[phase], completed=done, total=total)

        yield report


@contextmanager
def generating(num_prompts: int) -> Iterator[OnStep]:
    """Show a bar of finished prompts with the speed. Yields a function to call after each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        started = time.monotonic()

        def report(num_finished: int, num_tokens: int) -> None:
            speed = num_tokens / (time.monotonic() - started)
            bars.update(task, completed=num_finished, description=f"{speed:.0f} tok/s")

        yield report
