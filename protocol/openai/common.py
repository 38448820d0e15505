"""The request fields that chat and completions share, their way to `SamplingParams` and to an answer.

Types are checked here, ranges in `SamplingParams.check`, once for all wire formats and the offline API. What differs
between the two endpoints (where max_tokens and logprobs come from, what the fields are called) they override.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from protocol.body import ClientModel, at_most, fail_fast
from protocol.message_parts import MessageFormat
from protocol.openai.logprobs import TokenBytes
from protocol.openai.output import ChunkStream, Collector, Head, WireFormat
from protocol.openai.prompt_parts import PromptParts
from protocol.openai.structured import StructuredOutputFields

MAX_PRIORITY = 2**31 - 1
MAX_PROMPT_LOGPROBS = 2**21  # of one response; about 200 MB while it is made


def _token_ids_as_keys(value: Any) -> Any:
    # JSON has string keys only. The pattern is narrower than int(): no signs, blanks, underscores, other digits.
    if not isinstance(value, dict):
        return value
    for key in value:
        if not re.fullmatch(r"[0-9]{1,10}", str(key)):
            raise PydanticCustomError("rule", 'must map token ids to a bias, as in {"123": -100}')
    return {int(key): bias for key, bias in value.items()}


def _string_or_list(value: Any) -> str | None:
    return "$one" if isinstance(value, str) else "$many" if isinstance(value, list) else None


# Validators that run before others are called from right to left: sizes first.
LogitBias = Annotated[dict[int, float], BeforeValidator(_token_ids_as_keys), at_most(MAX_LOGIT_BIAS, "entries")]
TokenIds = Annotated[list[int], fail_fast]
StopStrings = Annotated[
    Annotated[str, Tag("$one")] | Annotated[list[str], at_most(MAX_STOP_STRINGS, "entries"), Tag("$many")],
    Discriminator(_string_or_list, custom_error_type="shape", custom_error_message="a string or an array of strings"),
]


def _larger(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else max(first, second)


class StreamOptions(ClientModel):
    """`include_obfuscation` is accepted as an unknown field: it would pad chunks, and ours are not padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(StructuredOutputFields):
    """What chat and completions requests have in common. `model` None means the model that is served."""

    wire: ClassVar[WireFormat]
    prompt_field: ClassVar[str]
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dry_multiplier": (0,),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logprob_token_ids": (),
        "lora_path": (),
        "mirostat": (0,),
        "mm_processor_kwargs": (),
        "no_stop_trim": (False,),
        "prompt_embeds": (),
        "repetition_detection": (),
        "return_prompt_text": (False,),
        "stop_regex": (),
        "stream_interval": (1,),
        "typical_p": (1,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "xtc_probability": (0,),
    }

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    seed: int | None = None
    allowed_token_ids: Annotated[TokenIds, at_most(MAX_ALLOWED_TOKEN_IDS, "entries")] | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS, "entries")] = Field(default_factory=list)
    stop: StopStrings | None = None
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS, "entries")] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: tokenizers' decoders put none
    echo: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)  # -1: what the context leaves
    truncation_side: Literal["left", "right"] = "left"  # what is cut off
    cache_salt: str | None = Field(default=None, pattern=r"^[^@/\\\x00]{1,128}$")
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(default=None, gt=0)  # seconds to the end of the answer
    ttft_timeout: float | None = Field(default=None, gt=0)  # seconds to its first token
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower runs first

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true; leave it out or stream.", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs is only sent with a whole answer; leave it out or do not stream.",
                param="prompt_logprobs",
            )
        return self

    def check_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Raise `InvalidRequest` if the log-probabilities of so many prompt tokens would fill the memory."""
        likely = _larger(self.prompt_logprobs, self._echo_logprobs())
        if likely is not None and (count := num_prompt_tokens * self.n * (likely + 1)) > MAX_PROMPT_LOGPROBS:
            name = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequest(
                f"{name} gives at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts in one answer, and these "
                f"would be {count}; send fewer prompts or ask for fewer.",
                param=name,
            )

    def truncated(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """The part of a prompt that the client wants to be used. Raises `InvalidRequest` if it asks for too much."""
        count = self.truncate_prompt_tokens
        if count is None:
            return token_ids
        if count == -1:
            count = max(1, max_model_len - max(1, self._max_tokens()[1] or 1))
        if not 0 < count <= max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {count}.",
                param="truncate_prompt_tokens",
            )
        return token_ids[-count:] if self.truncation_side == "left" else token_ids[:count]

    def prompt_parts(self, prompts: Sequence[list[int]], decode: Callable[[list[int]], str]) -> PromptParts | None:
        """What the answer repeats of these prompts; None if nothing. `decode` turns token ids into text."""
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
        """The text that `echo` puts before the answer to each prompt."""
        raise NotImplementedError

    def chunk_stream(
        self,
        head: Head,
        token_bytes: TokenBytes,
        prompt_tokens: Sequence[int] = (),
        parts: PromptParts | None = None,
        *,
        message_format: MessageFormat | None = None,
    ) -> ChunkStream:
        """What turns this request's outputs into its event stream. `prompt_tokens` are the lengths of its prompts."""
        options = self.stream_options or StreamOptions()
        return ChunkStream(
            self.wire,
            head,
            token_bytes,
            n=self.n,
            prompt_tokens=prompt_tokens,
            include_usage=options.include_usage,
            continuous_usage=options.include_usage and options.continuous_usage_stats,
            parts=parts,
            as_token_ids=self.return_tokens_as_token_ids,
            message_format=message_format,
        )

    def collector(
        self,
        head: Head,
        token_bytes: TokenBytes,
        parts: PromptParts | None = None,
        *,
        message_format: MessageFormat | None = None,
    ) -> Collector:
        """What turns this request's outputs into its one response body."""
        return Collector(
            self.wire,
            head,
            token_bytes,
            n=self.n,
            parts=parts,
            as_token_ids=self.return_tokens_as_token_ids,
            message_format=message_format,
        )

    def to_sampling_params(self, vocab_size: int) -> SamplingParams:
        """The decoding knobs, checked. Raises `InvalidRequest` whose message and param use this endpoint's names.

        `max_tokens` None is left None: the room that the prompt leaves is for the caller to know.
        """
        name, max_tokens = self._max_tokens()
        if max_tokens == 0 and not self.may_generate_nothing:
            raise InvalidRequest(f"{name} must be in [1, {2**31 - 1}], got 0.", param=name)
        params = SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or None,
            seed=None if self.seed == -1 else self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self._logprobs()[1],
            skip_special_tokens=self.skip_special_tokens,
            structured_output=self.structured_output()[1],
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            prompt_logprobs=_larger(self.prompt_logprobs, self._echo_logprobs()),
        )
        try:
            params.check(vocab_size)
        except InvalidRequest as error:
            raise self.in_client_words(error) from None
        return params

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """The engine's refusal of this request, with the fields called what this client calls them."""
        names = {
            "max_tokens": self._max_tokens()[0],
            "logprobs": self._logprobs()[0],
            "structured_output": self.structured_output()[0],
        }
        message = re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], str(error))
        param = {**names, "prompt": self.prompt_field}.get(error.param or "", error.param)
        return InvalidRequest(message, param=param, code=error.code)

    @property
    def may_generate_nothing(self) -> bool:
        """Whether an answer without a generated token tells something."""
        return False

    def _echo_logprobs(self) -> int | None:
        """How many likely tokens to tell with each echoed token; None: no log-probabilities of them."""
        return None

    def _max_tokens(self) -> tuple[str, int | None]:
        """The limit on generated tokens and the name of the field that it came from."""
        return "max_tokens", self.max_tokens

    def _logprobs(self) -> tuple[str, int | None]:
        """`SamplingParams.logprobs` and the name of the field that it came from."""
        raise NotImplementedError
