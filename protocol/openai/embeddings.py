"""POST /v1/embeddings: inputs to vectors, made from the hidden states of the served model.

The engine pools; here the vectors are cut to the dimensions asked for, brought to length 1, and written.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from engine.messages import RequestOutput
from protocol.body import ClientModel
from protocol.openai.common import MAX_PRIORITY, GenerationRequest
from protocol.openai.completions import Prompt, prompt_list
from protocol.openai.output import Head, UsageMeter, raise_if_failed


class PrefillRequest(GenerationRequest):
    """What the engine is asked for: to compute the inputs, and nothing more."""

    prompt_field: ClassVar[str] = "input"

    max_tokens: int | None = 0
    temperature: float = 0.0

    @property
    def may_generate_nothing(self) -> bool:
        return True

    def _logprobs(self) -> tuple[str, int | None]:
        return "logprobs", None


class EmbeddingRequest(ClientModel):
    """The body of POST /v1/embeddings. `dimensions` None means all that the model has."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"messages": (), "embed_dtype": ("float32",)}

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last"] | None = None  # None: as the server is set
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: str | None = Field(default=None, pattern=r"^[^@/\\\x00]{1,128}$")
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    timeout: float | None = Field(default=None, gt=0)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    @model_validator(mode="after")
    def _inputs_can_run(self) -> Self:
        inputs = self._inputs()
        if not inputs or not all(inputs):
            raise InvalidRequest("input must not be empty: it needs at least one token.", param="input")
        return self

    def inputs(self, vocab_size: int) -> list[str | list[int]]:
        """The inputs, text or token ids. Raises `InvalidRequest` for an id that the model does not have."""
        inputs = self._inputs()
        for each in inputs:
            if not isinstance(each, str) and not (min(each) >= 0 and max(each) < vocab_size):
                wrong = min(each) if min(each) < 0 else max(each)
                raise InvalidRequest(f"input must hold token ids in [0, {vocab_size - 1}], got {wrong}.", param="input")
        return inputs

    def check_dimensions(self, available: int) -> None:
        """Raise `InvalidRequest` if the model's vectors are shorter than what is asked for."""
        if self.dimensions is not None and self.dimensions > available:
            raise InvalidRequest(
                f"dimensions must be in [1, {available}] for this model, got {self.dimensions}.", param="dimensions"
            )

    def to_prefill(self) -> PrefillRequest:
        """The same request in the engine's terms."""
        names = PrefillRequest.model_fields.keys() & self.model_fields_set
        return PrefillRequest(**{name: getattr(self, name) for name in names})

    def _inputs(self) -> list[str | list[int]]:
        return prompt_list(self.input)


class EmbeddingWriter:
    """Makes the response body: `feed` every output, then `body`."""

    def __init__(self, request: EmbeddingRequest, head: Head) -> None:
        self._request = request
        self._head = head
        self._meter = UsageMeter(1)
        self._vectors: dict[int, bytes] = {}

    def feed(self, output: RequestOutput) -> None:
        """Take in a part. Raises `ApiError` if the output failed."""
        raise_if_failed(output)
        self._meter.add(output)
        if output.embedding is not None:
            self._vectors[output.index] = output.embedding

    def body(self) -> bytes:
        """`{"object": "list", "data": [...], "usage": ...}`, in the order of the inputs."""
        usage = self._meter.usage()
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(vector)}
            for index, vector in sorted(self._vectors.items())
        ]
        body = {
            "id": self._head.id,
            "object": "list",
            "created": self._head.created,
            "model": self._head.model,
            "data": data,
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")},
        }
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _shown(self, raw: bytes) -> NDArray[np.float32] | str:
        vector = _finished(np.frombuffer(raw, np.float32), self._request.dimensions, self._request.normalize)
        if self._request.encoding_format == "float":
            return vector
        little_endian = vector if sys.byteorder == "little" else vector.byteswap()
        return base64.b64encode(little_endian.tobytes()).decode()


def _finished(vector: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    vector = np.ascontiguousarray(vector[:dimensions])
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if normalize and length > 0 else vector
