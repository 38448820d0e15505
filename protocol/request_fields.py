"""The fields that requests of every dialect have, under one name and with one meaning.

Their types are checked here, the ranges of most in `SamplingParams.check`, once for all wire formats and the library.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine.errors import InvalidRequest
from engine.messages import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from protocol.body import RequestBody, at_most, fail_fast
from protocol.errors import shown
from protocol.tools.unsupported import IgnoredParts

MAX_PRIORITY = 2**31 - 1
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # entries, characters; as OpenAI limits them

_DIGITS = "[0-9]{1,10}"


def _token_ids_as_keys(value: Any) -> Any:
    # JSON has string keys only. The pattern is narrower than int(): no signs, blanks, underscores, other digits.
    if not isinstance(value, dict):
        return value
    for key in value:
        if not re.fullmatch(_DIGITS, str(key)):
            raise PydanticCustomError(
                "rule", f'must map token ids to a bias, as in {{"123": -100}}, and has the key {shown(key)}'
            )
    return {int(key): bias for key, bias in value.items()}


# Validators that run before others are called from right to left: sizes first.
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_token_ids_as_keys),
    at_most(MAX_LOGIT_BIAS, "entries"),
    Field(json_schema_extra={"propertyNames": {"pattern": f"^{_DIGITS}$"}, "maxProperties": MAX_LOGIT_BIAS}),
]
TokenIds = Annotated[list[int], fail_fast]
CacheSalt = Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")]


def _are_short(pairs: dict[str, str]) -> dict[str, str]:
    if any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in pairs.items()):
        limits = f"keys of at most {MAX_METADATA_KEY} and values of at most {MAX_METADATA_VALUE} characters"
        raise PydanticCustomError("rule", f"takes {limits}")
    return pairs


Metadata = Annotated[dict[str, str], AfterValidator(_are_short), at_most(MAX_METADATA, "entries")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class TruncatedPrompt(RequestBody):
    """A request with a prompt that may be truncated."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)  # -1: as many as fit
    truncation_side: Literal["left", "right"] = "left"  # the side that is cut off

    @property
    def left_out(self) -> IgnoredParts:
        """The parts of the request that have no effect."""
        return IgnoredParts(fields=self.without_effect)

    @property
    def keeps_special_tokens(self) -> bool:
        """True if truncation keeps the special tokens that the tokenizer puts around a text."""
        return False

    def truncated(self, token_ids: list[int], max_model_len: int, first: int = 0, last: int = 0) -> list[int]:
        """Return the prompt, truncated as requested, with its `first` and `last` tokens. Raises as `cut_to`."""
        count = self.cut_to(max_model_len)
        if count is None or len(token_ids) <= count:
            return token_ids
        if first + last >= count:
            first = last = 0
        end, room = len(token_ids) - last, count - first - last
        kept = token_ids[end - room : end] if self.truncation_side == "left" else token_ids[first : first + room]
        return token_ids[:first] + kept + token_ids[end:]

    def cut_to(self, most: int) -> int | None:
        """Return the number of tokens to which the prompt is truncated; None for none. Raises `InvalidRequest` for more
        than `most`."""
        count = self.truncate_prompt_tokens
        if count == -1:
            count = most - self.answer_room(most)
        if count is not None and not 0 < count <= most:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or in [1, {most}], got {count}.", param="truncate_prompt_tokens"
            )
        return count

    def answer_room(self, max_model_len: int) -> int:
        """Return how many tokens of the context `truncate_prompt_tokens: -1` leaves to the answer."""
        return 1


class EngineRequest(TruncatedPrompt):
    """A request that the engine answers. `model` None means the model that is served."""

    model: str | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    timeout: float | None = Field(default=None, gt=0)  # seconds to the end of the answer
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower runs first


class RequestFields(EngineRequest):
    """A request for text, in any dialect."""

    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS, "entries")] = Field(default_factory=list)
    ignore_eos: bool = False
    allowed_token_ids: Annotated[TokenIds, at_most(MAX_ALLOWED_TOKEN_IDS, "entries")] | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS, "entries")] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: decoders add none
    ttft_timeout: float | None = Field(default=None, gt=0)  # seconds to the first token

    def fill_in(self, defaults: Mapping[str, float | None]) -> None:
        """Set the fields of these names that the client did not set."""
        for name, value in defaults.items():
            if name not in self.model_fields_set and getattr(self, name, value) != value:
                setattr(self, name, value)

    @abstractmethod
    def translate(self) -> RequestFields:
        """Return the `protocol.openai.generation.GenerationRequest` for this request; OpenAI's return themselves.

        Raises `ApiError` 400 and `InvalidRequest`.
        """
