"""The front end of programs: prompts in, completions out, no event loop.

Core, checks and text are the same as the server's. `engine.frontend.shared_engine` runs the steps.
"""

from __future__ import annotations

import numbers
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeGuard

from tokenizers import Tokenizer

from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.errors import InvalidRequest, RequestFailed
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import RequestStream
from engine.frontend.shared_engine import Call, OnStep, SharedEngine
from engine.messages import EngineCoreRequest, FinishReason, Pooling, RequestOutput, SamplingParams, TokenLogprobs


@dataclass(kw_only=True)
class Completion:
    """One finished choice of a prompt."""

    index: int
    text: str = ""
    new_text: str = ""  # what this output added to the text of the outputs before it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hidden_state: bytes | None = None  # of the prompt, pooled, as float32, if `pooling` was given


@dataclass(kw_only=True)
class Generation:
    """The choices of one prompt. `outputs` is vLLM's name of `choices`."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    choices: list[Completion]
    prompt: str | None = None  # None for token ids
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None  # of all prompt tokens except the first, if requested

    @classmethod
    def begun(cls, request: EngineCoreRequest, prompt: str | None) -> Self:
        """Return the generation of a request, without any output."""
        choices = [Completion(index=index) for index in range(request.sampling.n)]
        return cls(prompt_token_ids=request.prompt_token_ids, num_cached_tokens=0, choices=choices, prompt=prompt)

    @property
    def outputs(self) -> list[Completion]:
        return self.choices

    def add(self, stream: RequestStream, outputs: Iterable[RequestOutput]) -> None:
        """Add outputs of its stream. Raises the error of a choice that failed."""
        for choice in self.choices:
            choice.new_text = ""
        for output in outputs:
            self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
            _add(self.choices[output.index], output)
        self.num_cached_tokens = stream.num_cached_tokens
        self.finished = all(choice.finish_reason is not None for choice in self.choices)


Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, token ids, or a dict with the text as `prompt` or the ids as `prompt_token_ids`."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
Prompts = Prompt | Iterable[Prompt]


class LLM:
    """Generate for lists of prompts. `app.library` opens an instance by the name of a model.

    Threads may share it: calls of `generate` that overlap run together, as one batch.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        *,
        seed: int | None = None,
        default_sampling: SamplingParams | None = None,
    ) -> None:
        self.core = core
        self._default_sampling = default_sampling or SamplingParams()
        self.tokenizer = tokenizer
        self._inputs = InputProcessor(
            tokenizer, vocab_size=core.executor.vocab_size, max_model_len=core.config.max_model_len, seed=seed
        )
        self._vocabulary = Vocabulary(tokenizer)
        self._engine = SharedEngine(core, OutputProcessor(self._vocabulary))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default of `generate`. `app.library` sets the recommendation of the model's authors."""
        return self._default_sampling

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
        begins_message: bool = False,
        pooling: Pooling | None = None,
        second_segments: Sequence[int] = (),
    ) -> list[Generation]:
        """Complete one prompt or several, and return the results in the order of the prompts.

        `sampling` is one for all or one for each. With `begins_message` the answers begin new texts instead of going on
        with the prompts; for `second_segments` see `EngineCoreRequest`. Raises InvalidRequest, mostly before anything
        runs, RequestFailed if a request fails in the engine, and EngineDead if the engine has ended. An interrupt of
        the call or an exception of `on_step` aborts the requests of this call and no others.
        """
        self._engine.check_process()
        read = read_prompts(prompts)
        per_prompt = self._per_prompt(sampling, len(read))
        requests = [
            EngineCoreRequest(
                request_id=f"prompt-{number}",
                prompt_token_ids=self.tokenizer.encode(text or "").ids if token_ids is None else token_ids,
                sampling=params,
                arrival_time=time.monotonic(),
                pooling=pooling,
                second_segment=second_segments[number] if second_segments else 0,
            )
            for number, ((text, token_ids), params) in enumerate(zip(read, per_prompt, strict=True))
        ]
        self.core.check_grammars(request.sampling for request in requests)
        children = self._inputs.process(requests)
        call = Call(requests, children, is_watched=on_step is not None, begins_message=begins_message)
        self._engine.run(call, on_step)
        return [
            _collect(request, stream, text)
            for request, stream, (text, _) in zip(requests, call.streams, read, strict=True)
        ]

    def close(self) -> None:
        """End the engine and all calls. The object cannot be used afterwards."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _per_prompt(self, sampling: object, num_prompts: int) -> Sequence[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self._default_sampling] * num_prompts
        if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
            raise InvalidRequest(f"sampling_params must be SamplingParams, or a list of them, got {_shown(sampling)}.")
        if len(sampling) != num_prompts:
            raise ValueError(
                f"{len(sampling)} sampling parameters for {num_prompts} prompts: give one, or one for each"
            )
        return sampling


def _collect(request: EngineCoreRequest, stream: RequestStream, prompt: str | None) -> Generation:
    generation = Generation.begun(request, prompt)
    generation.add(stream, stream.drain())
    if stream.error is not None:
        raise stream.error
    return generation


def read_prompts(prompts: object) -> list[tuple[str | None, list[int] | None]]:
    """Return the text and the token ids of each prompt. Raises InvalidRequest."""
    if isinstance(prompts, str | bytes | Mapping) or _are_token_ids(prompts):
        return [read_prompt(prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, got {_shown(prompts)}.", param="prompt")
    return [read_prompt(each) for each in prompts]


def read_prompt(prompt: object) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt. Raises InvalidRequest."""
    if isinstance(prompt, Mapping):
        if not prompt or prompt.keys() - {"prompt", "prompt_token_ids"}:
            names = ", ".join(map(str, prompt)) or "nothing"
            raise InvalidRequest(f"A prompt as a dict has prompt or prompt_token_ids, got {names}.", param="prompt")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if isinstance(text, str | None) and (_are_token_ids(token_ids) or token_ids == []):
        return text, [int(each) for each in token_ids]
    if isinstance(text, str) and token_ids is None:
        if found := _LONE_SURROGATE.search(text):
            raise InvalidRequest(
                f"A prompt has the lone surrogate U+{ord(found[0]):04X}, which is no text.", param="prompt"
            )
        return text, None
    wrong = text if token_ids is None else token_ids
    raise InvalidRequest(f"prompts must be texts or lists of token ids, got {_shown(wrong)}.", param="prompt")


def _are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(each, numbers.Integral) for each in value)


def _shown(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _add(choice: Completion, output: RequestOutput) -> None:
    if output.refusal is not None:
        raise output.refusal.as_error()
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error or "the request failed in the engine")
    choice.text += output.text
    choice.new_text += output.text
    choice.token_ids += output.token_ids
    if output.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + output.logprobs
    choice.finish_reason = output.finish_reason
    choice.stop_reason = output.stop_reason
    choice.hidden_state = output.embedding
