"""The request fields that chat and completions share, and the sampling parameters and answers made of them.

Types are checked here, ranges in `SamplingParams.check`, once for all dialects and the library. The endpoints override
what differs: the fields of max_tokens and logprobs, and their names.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from engine.messages import ALL_LOGPROBS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_STRINGS, RANGES, SamplingParams
from protocol.answers import Answer
from protocol.body import ClientModel, OneOf, at_most
from protocol.openai.logprobs import LogprobsWriter, PromptParts
from protocol.openai.structured import StructuredOutputFields
from protocol.request_fields import RequestFields, TokenIds
from protocol.syntax.message_parts import MessageFormat, TokenBytes

if TYPE_CHECKING:
    from protocol.syntax.model_syntax import ModelSyntax  # needs the template engine

NO_LIMIT = -1  # as max_tokens
MAX_LOGPROBS_IN_ALL = 2**21  # per response; about 200 MB while it is made

StopStrings = Annotated[
    str | Annotated[list[str], at_most(MAX_STOP_STRINGS, "entries")], OneOf("a string or an array of strings")
]


def _larger(first: int | None, second: int | None) -> int | None:
    """Return the larger of two numbers of log-probabilities."""
    if first is None or second is None:
        return second if first is None else first
    return ALL_LOGPROBS if ALL_LOGPROBS in (first, second) else max(first, second)


class StreamOptions(ClientModel):
    """Options of a stream. `include_obfuscation` is an unknown field, because chunks are not padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@cache
def _shared_with_sampling(request: type[GenerationRequest]) -> tuple[str, ...]:
    return tuple(name for name in SamplingParams.__struct_fields__ if name in request.model_fields)


class GenerationRequest(RequestFields, StructuredOutputFields):
    """The fields that chat and completions requests share."""

    wire: ClassVar[WireFormat]
    prompt_field: ClassVar[str]
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("dry_multiplier", "mirostat", "xtc_probability"), (0,)),
        **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
        **dict.fromkeys(("no_stop_trim", "return_prompt_text", "use_beam_search"), (False,)),
        **dict.fromkeys(("kv_transfer_params", "lora_path"), ()),
        **dict.fromkeys(("prompt_embeds", "repetition_detection", "stop_regex"), ()),
        **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
        "top_n_sigma": (-1, 0),
        "dynatemp_range": (0,),
        "deterministic": (False,),
    }

    max_tokens: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: StopStrings | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[TokenIds, at_most(MAX_LOGPROB_TOKEN_IDS, "entries")] = Field(default_factory=list)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True
    stream_options: StreamOptions | None = None
    service_tier: str | None = None  # without effect: there is only `default`, which the answer names if this is set

    @model_validator(mode="after")
    def _options_have_what_they_need(self) -> Self:
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats needs include_usage: true; send it or leave both out.",
                param="stream_options.continuous_usage_stats",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true; leave it out or stream.", param="stream_options"
            )
        if self.logprob_token_ids and self._logprobs()[1] is None:
            raise InvalidRequest("logprob_token_ids requires logprobs; set both.", param="logprob_token_ids")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(
                f"best_of must equal n ({self.n}) here, got {self.best_of}: nothing is generated that is not shown.",
                param="best_of",
            )
        return self

    def translate(self) -> Self:
        return self

    def prompts(self, vocab_size: int) -> Sequence[Any]:
        """Return the texts and token ids, or this conversation. Raises `InvalidRequest` for ids beyond `vocab_size`."""
        return [self]

    def check_template_kwargs(self, allowed: Collection[str]) -> None:
        """Raise `InvalidRequest` for a variable of the template that clients may not set."""

    def with_syntax(self, sampling: SamplingParams, syntax: ModelSyntax, prompt_end: bytes) -> SamplingParams:
        """Return `sampling` with the additions of the model's syntax for a prompt that ends with `prompt_end`."""
        return sampling

    def message_format(self, syntax: ModelSyntax, prompt_end: bytes) -> MessageFormat:
        """Return how to read the answer to a prompt that ends with `prompt_end`: as text, unless it is a message."""
        return MessageFormat()

    @property
    def begins_message(self) -> bool:
        """True if the answer begins a message, false if it continues the prompt's text."""
        return False

    def check_outputs(self, prompt_lengths: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
        """Raise `InvalidRequest` if the log-probabilities of these prompts or of their answers would take too much
        memory, or other outputs of a subclass.

        One choice that fills the context is always allowed, unless it asks for the whole vocabulary.
        """
        likely = _larger(self.prompt_logprobs, self._echo_logprobs())
        if likely is not None:
            per_token = vocab_size if likely == ALL_LOGPROBS else likely + 1
            if (count := sum(prompt_lengths) * self.n * per_token) > MAX_LOGPROBS_IN_ALL:
                name = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
                raise InvalidRequest(
                    f"{name} gives at most {MAX_LOGPROBS_IN_ALL} log-probabilities of prompts in one answer, and these "
                    f"would be {count}; send fewer prompts or ask for fewer.",
                    param=name,
                )
        name, asked = self._logprobs()
        if asked is None:
            return
        limit_name, limit = self._max_tokens()
        longest = max_model_len if limit is None or limit == NO_LIMIT else limit
        num_tokens = self.n * sum(min(longest, max_model_len - length) for length in prompt_lengths)
        per_token, most = (len(self.logprob_token_ids) or asked) + 1, MAX_LOGPROBS_IN_ALL
        if asked == ALL_LOGPROBS and not self.logprob_token_ids:
            per_token = vocab_size
        else:
            most = max(most, max_model_len * per_token)
        if num_tokens * per_token > most:
            fitting = most // (per_token * self.n * len(prompt_lengths))
            raise InvalidRequest(
                f"{name} would give {per_token} log-probabilities for each of {num_tokens} tokens; allowed: {most} "
                f"in one answer. Ask for {limit_name} of at most {fitting}, fewer choices or fewer log-probabilities.",
                param=name,
            )

    def answer_room(self, max_model_len: int) -> int:
        """Return how many tokens of the context a truncated prompt leaves to the answer: the client's limit on tokens.

        It is at most half of the context, because many clients ask for more than any context holds.
        """
        return max(1, min(self._max_tokens()[1] or 1, max_model_len // 2))

    @property
    def answers_in_old_form(self) -> bool:
        """True if a call is written as `function_call`, the form before tools."""
        return False

    def prompt_parts(self, prompts: Sequence[list[int]], decode: Callable[[list[int]], str]) -> PromptParts | None:
        """Return what the answer repeats of these prompts, if anything. `decode` turns token ids into text."""
        if not self.echo and not self.return_token_ids and self.prompt_logprobs is None:
            return None
        return PromptParts(
            token_ids=prompts,
            echo=self.echo_texts(decode, prompts) if self.echo else None,
            echo_logprobs=self._echo_logprobs(),
            prompt_logprobs=self.prompt_logprobs,
            return_token_ids=self.return_token_ids,
        )

    def echo_texts(self, decode: Callable[[list[int]], str], prompts: Sequence[list[int]]) -> list[str]:
        """Return the text that `echo` puts before the answer to each prompt."""
        return [""] * len(prompts)

    def to_sampling_params(self, vocab_size: int) -> SamplingParams:
        """Return the checked sampling parameters. Raises `InvalidRequest` with this endpoint's names of fields.

        `max_tokens` None stays None; the caller knows how much of the context the prompt leaves.
        """
        name, max_tokens = self._max_tokens()
        least = 0 if self.may_generate_nothing else 1
        if max_tokens is not None and max_tokens < least and max_tokens != NO_LIMIT:
            raise InvalidRequest(
                f"{name} must be at least {least}, or {NO_LIMIT} for as many as fit, got {max_tokens}.", param=name
            )
        values: dict[str, Any] = {name: getattr(self, name) for name in _shared_with_sampling(type(self))} | {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logit_bias": self.logit_bias or None,
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": None if max_tokens in (None, NO_LIMIT) else min(max_tokens, RANGES["max_tokens"][1]),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logprobs": self._logprobs()[1],
            "structured_output": self.structured_output()[1],
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": tuple(self.bad_words),
            "logprob_token_ids": tuple(dict.fromkeys(self.logprob_token_ids)),
            "prompt_logprobs": _larger(self.prompt_logprobs, self._echo_logprobs()),
        }
        params = SamplingParams(**values)
        try:
            params.check(vocab_size)
        except InvalidRequest as error:
            raise self.in_client_words(error) from None
        return params

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """Return the engine's refusal of this request with the client's names of the fields."""
        names = {
            "max_tokens": self._max_tokens()[0],
            "logprobs": self._logprobs()[0],
            "structured_output": self.structured_output()[0],
        }
        message = re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], str(error))
        if error.param == "structured_output":
            message += self.advice_on(message)
        param = {**names, "prompt": self.prompt_field}.get(error.param or "", error.param)
        return InvalidRequest(message, param=param, code=error.code)

    @property
    def may_generate_nothing(self) -> bool:
        """True if an answer without generated tokens is useful."""
        return False

    def _echo_logprobs(self) -> int | None:
        """Return the number of likely tokens with each echoed token; None for no log-probabilities."""
        return None

    def _max_tokens(self) -> tuple[str, int | None]:
        """Return the name of the request's field and its limit on generated tokens."""
        return "max_tokens", self.max_tokens

    @abstractmethod
    def _logprobs(self) -> tuple[str, int | None]:
        """Return the name of the request's field and its value for `SamplingParams.logprobs`."""


@dataclass(frozen=True)
class WireFormat:
    """One endpoint's form of a choice.

    `opening` is the first chunk of a choice (None for none), `closing` the empty text part of the chunk with the finish
    reason; `chunk_text` and `full_text` put text in a chunk and in a `choice` of a `whole` response. `prompt_in_choice`
    is true if repeated parts of a prompt belong to each choice, not to the response.
    """

    chunk_object: str
    whole: Callable[..., Answer]
    choice: Callable[..., Answer]
    opening: dict[str, Any] | None
    closing: dict[str, Any]
    chunk_text: Callable[[str], dict[str, Any]]
    full_text: Callable[[str], dict[str, Any]]
    logprobs: Callable[[TokenBytes, bool, Container[int], int], LogprobsWriter]
    prompt_in_choice: bool
