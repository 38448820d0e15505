"""The request fields that chat and completions share, their way to `SamplingParams` and to an answer.

Types are checked here, ranges in `SamplingParams.check`, once for all wire formats and the offline API. What differs
between the two endpoints (where max_tokens and logprobs come from, what the fields are called) they override.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from protocol.body import ClientModel, at_most, fail_fast
from protocol.openai.logprobs import TokenBytes
from protocol.openai.output import ChunkStream, Collector, Head, WireFormat


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


class StreamOptions(ClientModel):
    """`include_obfuscation` is accepted as an unknown field: it would pad chunks, and ours are not padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(ClientModel):
    """What chat and completions requests have in common. `model` None means the model that is served."""

    wire: ClassVar[WireFormat]
    prompt_field: ClassVar[str]
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "prompt_logprobs": (),
        "echo": (False,),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "grammar": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "cache_salt": (),
        "documents": (),
        "length_penalty": (1.0,),
        "logprob_token_ids": (),
        "lora_path": (),
        "prompt_embeds": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
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
    stop: StopStrings | None = None
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS, "entries")] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(default=None, gt=0)  # seconds to the end of the answer
    ttft_timeout: float | None = Field(default=None, gt=0)  # seconds to its first token
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)  # lower runs first

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true; leave it out or stream.", param="stream_options"
            )
        return self

    def chunk_stream(self, head: Head, token_bytes: TokenBytes, prompt_tokens: Sequence[int] = ()) -> ChunkStream:
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
        )

    def collector(self, head: Head, token_bytes: TokenBytes) -> Collector:
        """What turns this request's outputs into its one response body."""
        return Collector(self.wire, head, token_bytes, n=self.n)

    def to_sampling_params(self, vocab_size: int) -> SamplingParams:
        """The decoding knobs, checked. Raises `InvalidRequest` whose message and param use this endpoint's names.

        `max_tokens` None is left None: the room that the prompt leaves is for the caller to know.
        """
        name, max_tokens = self._max_tokens()
        if max_tokens == 0:
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
        )
        try:
            params.check(vocab_size)
        except InvalidRequest as error:
            raise self.in_client_words(error) from None
        return params

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """The engine's refusal of this request, with the fields called what this client calls them."""
        names = {"max_tokens": self._max_tokens()[0], "logprobs": self._logprobs()[0]}
        message = re.sub(r"\b(max_tokens|logprobs)\b", lambda match: names[match[0]], str(error))
        param = {**names, "prompt": self.prompt_field}.get(error.param or "", error.param)
        return InvalidRequest(message, param=param, code=error.code)

    def _max_tokens(self) -> tuple[str, int | None]:
        """The limit on generated tokens and the name of the field that it came from."""
        return "max_tokens", self.max_tokens

    def _logprobs(self) -> tuple[str, int | None]:
        """`SamplingParams.logprobs` and the name of the field that it came from."""
        raise NotImplementedError
