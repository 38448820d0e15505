"""POST /v1/completions: the request, its prompts, and the form of its answers.

Several prompts make one response; choice `i` of prompt `p` has index `p * n + i`, in streams too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from engine.errors import InvalidRequest
from protocol.body import at_most, fail_fast
from protocol.openai.answers import Completion, CompletionChoice
from protocol.openai.generation import GenerationRequest, WireFormat
from protocol.openai.logprobs import CompletionLogprobs
from protocol.request_fields import TokenIds

MAX_PROMPTS = 1024
MAX_INPUTS = 8192


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "$text"
    if not isinstance(value, list):
        return None
    match value:
        case [int() | float(), *_]:
            return "$tokens"
        case [list(), *_]:
            return "$token_lists"
        case _:
            return "$texts"


_NOT_EMPTY = Field(json_schema_extra={"minItems": 1})  # which `prompt_list` checks
_Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
_Tokens = Annotated[TokenIds, _NOT_EMPTY]
_SHAPE = Discriminator(
    _prompt_shape,
    custom_error_type="shape",
    custom_error_message="a string, an array of strings, an array of token ids or an array of arrays of token ids",
)
_PROMPTS, _INPUTS = at_most(MAX_PROMPTS, "prompts"), at_most(MAX_INPUTS, "inputs")
Prompt = Annotated[
    Annotated[_Text, Tag("$text")]
    | Annotated[list[_Text], fail_fast, _PROMPTS, _NOT_EMPTY, Tag("$texts")]
    | Annotated[_Tokens, Tag("$tokens")]
    | Annotated[list[_Tokens], fail_fast, _PROMPTS, _NOT_EMPTY, Tag("$token_lists")],
    _SHAPE,
]
Inputs = Annotated[  # of embeddings
    Annotated[_Text, Tag("$text")]
    | Annotated[list[_Text], fail_fast, _INPUTS, _NOT_EMPTY, Tag("$texts")]
    | Annotated[_Tokens, Tag("$tokens")]
    | Annotated[list[_Tokens], fail_fast, _INPUTS, _NOT_EMPTY, Tag("$token_lists")],
    _SHAPE,
]


Prompts = Sequence[str | list[int]]


def prompt_list(prompt: Prompt, param: str) -> Prompts:
    """Return the prompts of a field that takes one or several. Raises `InvalidRequest` for none or an empty one."""
    one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts = cast("Prompts", [prompt] if one else prompt)
    if not prompts or not all(prompts):
        raise InvalidRequest(f"{param} must not be empty: it needs at least one token.", param=param)
    return prompts


def check_token_ids(prompts: Prompts, vocab_size: int, param: str) -> None:
    for prompt in prompts:
        if not isinstance(prompt, str) and not (min(prompt) >= 0 and max(prompt) < vocab_size):
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise InvalidRequest(f"{param} must hold token ids in [0, {vocab_size - 1}], got {wrong}.", param=param)


COMPLETION = WireFormat(
    chunk_object="text_completion",
    whole=Completion,
    choice=CompletionChoice,
    opening=None,
    closing={"text": ""},
    chunk_text=lambda text: {"text": text},
    full_text=lambda text: {"text": text},
    logprobs=CompletionLogprobs,
    prompt_in_choice=True,
)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    wire: ClassVar[WireFormat] = COMPLETION
    prompt_field: ClassVar[str] = "prompt"
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationRequest.unsupported,
        "suffix": ("",),
        "documents": (),
    }

    prompt: Prompt
    max_tokens: int | None = 16
    logprobs: int | None = None

    @model_validator(mode="after")
    def _prompts_can_run(self) -> Self:
        prompt_list(self.prompt, "prompt")
        return self

    def fill_in(self, defaults: Mapping[str, float | None]) -> None:
        super().fill_in({name: value for name, value in defaults.items() if name != "max_tokens"})  # it is 16 here

    def prompts(self, vocab_size: int) -> Prompts:
        prompts = prompt_list(self.prompt, "prompt")
        check_token_ids(prompts, vocab_size, "prompt")
        return prompts

    def echo_texts(self, decode: Callable[[list[int]], str], prompts: Sequence[list[int]]) -> list[str]:
        whole = self.truncate_prompt_tokens is None
        return [
            given if isinstance(given, str) and whole else decode(token_ids)
            for given, token_ids in zip(prompt_list(self.prompt, "prompt"), prompts, strict=True)
        ]

    def _logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    @property
    def may_generate_nothing(self) -> bool:
        return self.echo or self.prompt_logprobs is not None

    def _echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None
