"""POST /v1/embeddings: vectors of inputs, from the hidden states of the served model.

The engine pools. This module truncates vectors to the requested dimensions, normalizes and writes them.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import orjson
from msgspec import Raw
from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from engine.messages import Pooling, RequestOutput
from protocol.answers import AnswerContext, encode, raise_if_failed
from protocol.body import at_most, fail_fast
from protocol.openai.answers import Embedding, EmbeddingList, EmbeddingUsage
from protocol.openai.chat import MAX_MESSAGES, ChatCompletionRequest, ChatMessage
from protocol.openai.completions import Inputs, Prompts, check_token_ids, prompt_list
from protocol.openai.generation import GenerationRequest
from protocol.openai.output import UsageMeter
from protocol.request_fields import EngineRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MAX_NUMBERS = 2**23  # in the vectors of an answer's tokens; about 150 MB while it is made


class PrefillRequest(GenerationRequest):
    """The request to the engine: compute the inputs and generate nothing."""

    prompt_field: ClassVar[str] = "input"

    max_tokens: int | None = 0
    temperature: float = 0.0
    vector_size: int = 0  # of each token's vector, if the answer has these

    def check_outputs(self, prompt_lengths: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
        super().check_outputs(prompt_lengths, vocab_size=vocab_size, max_model_len=max_model_len)
        count = sum(prompt_lengths) * self.vector_size
        if count > MAX_NUMBERS and len(prompt_lengths) > 1:
            raise InvalidRequest(
                f"{self.prompt_field} would give {count} numbers; allowed: {MAX_NUMBERS} in one answer, or one input. "
                "Send fewer or shorter inputs.",
                param=self.prompt_field,
            )

    @property
    def may_generate_nothing(self) -> bool:
        return True

    @property
    def keeps_special_tokens(self) -> bool:
        return True

    def answer_room(self, max_model_len: int) -> int:
        return 0

    def _logprobs(self) -> tuple[str, int | None]:
        return "logprobs", None


class ConversationPrefill(PrefillRequest):
    """The prefill of a conversation: errors name `messages`."""

    prompt_field: ClassVar[str] = "messages"


class EmbeddingRequest(EngineRequest):
    """The body of POST /v1/embeddings. `dimensions` None means all that the model has.

    A request has `messages` or `input`, as in vLLM; the chat template makes one text of `messages`.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"embed_dtype": ("float32",)}

    input: Inputs | None = None
    messages: Annotated[list[ChatMessage], fail_fast, at_most(MAX_MESSAGES, "messages")] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    encoding_format: Literal["float", "base64", "int8", "binary"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last", "cls", "weighted_mean"] | None = None  # None: the server's setting
    truncate: bool = False  # as `truncate_prompt_tokens` -1
    prompt_name: str | None = None  # one of the prompts in the model's files
    normalize: bool = True
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _inputs_can_run(self) -> Self:
        if self.messages is not None and self.input is not None:
            raise InvalidRequest("messages cannot be combined with input; send one of them.", param="messages")
        if self.messages is not None and self.prompt_name is not None:
            raise InvalidRequest(
                "prompt_name needs input: it does not apply to messages. Leave out one of them.", param="prompt_name"
            )
        if self.messages is None and self.input is None:
            raise InvalidRequest("input or messages is required.", param="input")
        if self.input is not None:
            prompt_list(self.input, "input")
        return self

    def conversation(self) -> ChatCompletionRequest | None:
        """Return the chat request that makes the text from `messages`; None if there is an `input`."""
        if self.messages is None:
            return None
        return ChatCompletionRequest(**{"add_generation_prompt": False} | self.given(ChatCompletionRequest))

    def inputs(self, vocab_size: int, prompts: Mapping[str, str], default: str | None) -> Prompts:
        """Return the inputs, text or token ids. Texts begin with the prompt that the request names, or `default`.

        `prompts` are the model's prompts by name. Raises `InvalidRequest` for a token id or a prompt that the model
        does not have, and for `prompt_name` with token ids.
        """
        assert self.input is not None
        inputs = prompt_list(self.input, "input")
        check_token_ids(inputs, vocab_size, "input")
        if self.prompt_name is not None and self.prompt_name not in prompts:
            named = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequest(
                f"prompt_name must be a prompt of this model ({named}), got {self.prompt_name!r:.80}.",
                param="prompt_name",
            )
        if self.prompt_name is not None and not all(isinstance(each, str) for each in inputs):
            raise InvalidRequest(
                "prompt_name needs input as text: token ids were sent. Leave out prompt_name or send text.",
                param="prompt_name",
            )
        prompt = self.prompt(prompts, default)
        return [prompt + each if isinstance(each, str) else each for each in inputs] if prompt else inputs

    def prompt(self, prompts: Mapping[str, str], default: str | None) -> str:
        """Return the prompt with which texts begin."""
        name = default if self.prompt_name is None else self.prompt_name
        return "" if name is None or self.messages is not None else prompts[name]

    def check_dimensions(self, available: int) -> None:
        """Raise `InvalidRequest` if the model's vectors are shorter than `dimensions`."""
        if self.dimensions is not None and self.dimensions > available:
            raise InvalidRequest(
                f"dimensions must be in [1, {available}] for this model, got {self.dimensions}.", param="dimensions"
            )

    def kind(self, default: str, *, is_encoder: bool) -> Pooling:
        """Return the pooling, by default that of server or model. Raises `InvalidRequest` for a kind that a decoder
        does not have, and for `messages` to an encoder, which has no chat template."""
        kind = Pooling(self.pooling or default)
        if not is_encoder and kind not in (Pooling.MEAN, Pooling.LAST):
            raise InvalidRequest(f"pooling must be mean or last for this model, got {kind.value!r}.", param="pooling")
        if is_encoder and self.messages is not None:
            raise InvalidRequest(
                "messages need a chat template, which an encoder does not have. Send input.", param="messages"
            )
        return kind

    def to_prefill(self, *, is_encoder: bool) -> PrefillRequest:
        """Return the request to the engine. Of a text for an encoder, the end is cut off by default, as in
        sentence-transformers."""
        prefill = PrefillRequest if self.messages is None else ConversationPrefill
        given: dict[str, Any] = {"truncation_side": "right"} if is_encoder else {}
        given |= {"truncate_prompt_tokens": -1} if self.truncate else {}
        return prefill(**given | self.given(PrefillRequest))


R = TypeVar("R", bound=EngineRequest)


class PrefillWriter(Generic[R]):
    """Collects what the engine has computed for each input. Subclasses write the body."""

    def __init__(self, request: R, answer: AnswerContext) -> None:
        self._request = request
        self._answer = answer
        self._meter = UsageMeter(1)
        self._found: dict[int, Any] = {}

    def feed_output(self, output: RequestOutput) -> None:
        raise_if_failed(output)
        self._meter.add(output)
        if (found := self._read(output)) is not None:
            self._found[output.index] = found

    def _read(self, output: RequestOutput) -> Any:
        return output.embedding

    def _in_order(self) -> list[Any]:
        return [found for _, found in sorted(self._found.items())]

    def _fields(self) -> dict[str, Any]:
        """Return the fields that all bodies of OpenAI's shape have."""
        found = self._meter.usage()
        usage = EmbeddingUsage(found.prompt_tokens, found.prompt_tokens, found.prompt_tokens_details)
        return {**self._answer.head._asdict(), "usage": usage}


class EmbeddingBodyWriter(PrefillWriter[EmbeddingRequest]):
    def body(self) -> bytes:
        data = [
            Embedding(index=i, embedding=self._encoded(self._finished(raw))) for i, raw in enumerate(self._in_order())
        ]
        return encode(EmbeddingList(data=data, **self._fields()))

    def _finished(self, raw: bytes) -> NDArray[np.float32]:
        request = self._request
        return finished_vector(raw, request.dimensions, request.normalize or request.encoding_format == "int8")

    def _encoded(self, vectors: NDArray[Any]) -> Any:
        import numpy as np

        form = self._request.encoding_format
        if form == "int8":
            vectors = np.rint(127 * vectors).astype(np.int8)
        elif form == "binary":  # eight signs in a byte, as sentence-transformers packs them
            vectors = (np.packbits(vectors > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)
        if form != "base64":
            return Raw(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))
        little_endian = vectors if sys.byteorder == "little" else vectors.byteswap()
        return base64.b64encode(little_endian.tobytes()).decode()


def finished_vector(raw: bytes, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Return a pooled hidden state, truncated to `dimensions` and normalized to length 1."""
    import numpy as np  # here, because the server answers before it needs them

    vector = np.ascontiguousarray(np.frombuffer(raw, np.float32)[:dimensions])
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if normalize and length > 0 else vector
