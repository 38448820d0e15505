"""The front end of programs: prompts in, completions out, no event loop.

Core, checks and text are the same as the server's. `engine.frontend.shared_engine` runs the steps.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hidden_state: bytes | None = None  # of the prompt, pooled, as float32, if `pooling` was given


@dataclass(kw_only=True)
class Generation:
    """The choices of one prompt."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    choices: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None  # of all prompt tokens except the first, if requested


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
        prompts: Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
        begins_message: bool = False,
        pooling: Pooling | None = None,
    ) -> list[Generation]:
        """Complete every prompt (text, or token ids) and return the results in the order of the prompts.

        A string is one prompt. A prompt must be text or a list of token ids.

        `sampling` is one for all or one for each. With `begins_message` the answers begin new texts instead of going on
        with the prompts. Raises InvalidRequest, mostly before anything runs, RequestFailed if a request fails in the
        engine, and EngineDead if the engine has ended. An interrupt of the call or an exception of `on_step` aborts the
        requests of this call and no others.
        """
        self._engine.check_process()
        prompts = [prompts] if isinstance(prompts, str | bytes) else prompts
        per_prompt = self._per_prompt(sampling, len(prompts))
        requests = [
            EngineCoreRequest(
                request_id=f"prompt-{number}",
                prompt_token_ids=self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else _checked(prompt),
                sampling=params,
                arrival_time=time.monotonic(),
                pooling=pooling,
            )
            for number, (prompt, params) in enumerate(zip(prompts, per_prompt, strict=True))
        ]
        self.core.check_grammars(request.sampling for request in requests)
        children = self._inputs.process(requests)
        call = Call(requests, children, is_watched=on_step is not None, begins_message=begins_message)
        self._engine.run(call, on_step)
        return [
            _collect(request, stream, params.n)
            for request, stream, params in zip(requests, call.streams, per_prompt, strict=True)
        ]

    def _per_prompt(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self._default_sampling] * num_prompts
        if len(sampling) != num_prompts:
            raise ValueError(
                f"{len(sampling)} sampling parameters for {num_prompts} prompts: give one, or one for each"
            )
        return sampling


def _collect(request: EngineCoreRequest, stream: RequestStream, n: int) -> Generation:
    generation = Generation(
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=0,
        choices=[Completion(index=index) for index in range(n)],
    )
    for output in stream.drain():
        generation.prompt_logprobs = generation.prompt_logprobs or output.prompt_logprobs
        _add(generation.choices[output.index], output)
    if stream.error is not None:
        raise stream.error
    generation.num_cached_tokens = stream.num_cached_tokens
    return generation


def _checked(prompt: object) -> list[int]:
    """Return the token ids of a prompt that is not text."""
    if isinstance(prompt, list | tuple) and all(isinstance(each, numbers.Integral) for each in prompt):
        return list(map(int, prompt))
    raise InvalidRequest(f"prompts must be texts or lists of token ids, got a {type(prompt).__name__}.", param="prompt")


def _add(choice: Completion, output: RequestOutput) -> None:
    if output.refusal is not None:
        raise output.refusal.as_error()
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error or "the request failed in the engine")
    choice.text += output.text
    choice.token_ids += output.token_ids
    if output.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + output.logprobs
    choice.finish_reason = output.finish_reason
    choice.stop_reason = output.stop_reason
    choice.hidden_state = output.embedding
