"""The offline front door: prompts in, completions out, no event loop.

The same core, the same checks and the same text as the server's; only the loop is a plain `while`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from engine.core.core import EngineCore
from engine.errors import RequestFailed
from engine.frontend.detokenizer import Vocabulary
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import RequestStream
from engine.messages import EngineCoreRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

OnStep = Callable[[int, int], None]
"""Is told after each step how many prompts have finished, and how many tokens have been generated so far."""


@dataclass(kw_only=True)
class Completion:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class Generation:
    """Everything that one prompt gave."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    choices: list[Completion]


class LLM:
    """Generates for lists of prompts on the calling thread. `app.offline` opens one by the name of a model."""

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
            vocab_size=core.executor.vocab_size,
            max_model_len=core.config.max_model_len,
            seed=seed,
            tokenizer=tokenizer,
        )
        self._outputs = OutputProcessor(Vocabulary(tokenizer))

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` samples with where it is given none: what the model's authors recommend, in `app.offline`."""
        return self._default_sampling

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[Generation]:
        """Complete every prompt (text, or token ids) and return the results in the order of the prompts.

        A string is one prompt.

        `sampling` is one for all or one for each. Raises InvalidRequest before anything runs if one of them cannot, or
        later if only that shows it, and RequestFailed if one fails in the engine.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        per_prompt = self._per_prompt(sampling, len(prompts))
        requests = [
            EngineCoreRequest(
                request_id=f"prompt-{number}",
                prompt_token_ids=self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt,
                sampling=params,
                arrival_time=time.monotonic(),
            )
            for number, (prompt, params) in enumerate(zip(prompts, per_prompt, strict=True))
        ]
        self.core.check_grammars(request.sampling for request in requests)
        children = self._inputs.process(requests)
        streams = [self._outputs.open([request], kids) for request, kids in zip(requests, children, strict=True)]
        try:
            for kids in children:
                for child in kids:
                    self.core.add(child)
            self._run(streams, on_step)
        finally:
            for stream in streams:
                for child_id in self._outputs.close(stream):
                    self.core.finish_request(child_id, FinishReason.ABORT)
            while self.core.has_work:
                self.core.step()
        return [
            _collect(request, stream, params.n)
            for request, stream, params in zip(requests, streams, per_prompt, strict=True)
        ]

    def _run(self, streams: list[RequestStream], on_step: OnStep | None) -> None:
        num_tokens = 0
        while self._outputs.num_choices:
            batch = self.core.step()
            for child_id in self._outputs.process(batch):
                self.core.finish_request(child_id, FinishReason.STOP)
            self._outputs.hand_over()
            num_tokens += sum(len(output.new_token_ids) for output in batch.outputs)
            if on_step is not None:
                on_step(sum(stream.num_unfinished == 0 for stream in streams), num_tokens)

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
    choices = [Completion(index=index) for index in range(n)]
    for output in stream.drain():
        _add(choices[output.index], output)
    return Generation(
        prompt_token_ids=request.prompt_token_ids, num_cached_tokens=stream.num_cached_tokens, choices=choices
    )


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
