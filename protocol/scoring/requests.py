"""The bodies of /v1/rerank, /v2/rerank, /v1/score, /v1/classify and /v1/pooling, and the texts that they score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from engine.errors import InvalidRequest
from engine.messages import Pooling
from protocol.body import ClientModel, OneOf, at_most, fail_fast
from protocol.openai.completions import Inputs, Prompts, check_token_ids, prompt_list
from protocol.openai.embeddings import EmbeddingRequest, PrefillRequest
from protocol.request_fields import EngineRequest

MAX_DOCUMENTS = 8192
DEFAULT_TOKENS_PER_DOC = 4096  # Cohere's


class Pair(NamedTuple):
    """A query, and a text that is scored for it; `param` is the text's field, for errors."""

    query: str
    document: str
    param: str


# ---------------------------------------------------------------------------------------------------- Qwen3-Reranker
# The prompt of its model card. The parts are tokenized one by one; only the middle one is truncated.

QWEN3_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def qwen3_head(query: str, instruction: str) -> str:
    """Return the prompt up to the document; a space separates the two."""
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"


# ------------------------------------------------------------------------------------------------------------ requests


class ScoringPrefill(PrefillRequest):
    """The request to a decoder that scores: the log-probabilities of its labels' tokens after the prompt."""

    max_tokens: int | None = 1
    ignore_eos: bool = True

    def answer_room(self, max_model_len: int) -> int:
        return 1

    def _logprobs(self) -> tuple[str, int | None]:
        return "logprobs", 0 if self.logprob_token_ids else None


class ScoringRequest(EngineRequest):
    """A request for scores. `raw_scores` are logits."""

    raw_scores: bool = False
    truncate: bool = False  # as `truncate_prompt_tokens: -1`

    def to_prefill(self, token_ids: Sequence[int]) -> PrefillRequest:
        """Return the request to the engine; `token_ids` are the labels' tokens of a decoder. An encoder's text is
        cut at its end by default."""
        fields: dict[str, Any] = {"truncate_prompt_tokens": -1} if self.truncate else {}
        fields |= self.given(PrefillRequest)
        if token_ids:
            return ScoringPrefill(**fields, logprob_token_ids=list(token_ids))
        return PrefillRequest(**{"truncation_side": "right"} | fields)


class PairsRequest(ScoringRequest):
    """A request that scores pairs. Texts can only be cut at their end."""

    truncation_side: Literal["right"] = "right"
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    instruction: str | None = None  # for models with an instruction in their prompt

    @abstractmethod
    def pairs(self) -> list[Pair]:
        """Return the texts. Raises `InvalidRequest` if there are none."""

    def longest(self, room: int) -> int | None:
        """Return the number of tokens to which a pair is cut; None: not cut. `room` is what the model takes."""
        return room if self.truncate and self.truncate_prompt_tokens is None else self.cut_to(room)

    def answer_room(self, max_model_len: int) -> int:
        return 0


@dataclass(frozen=True)
class PairPrompts:
    """The pairs of a request. A decoder reads them in the prompt of Qwen3-Reranker with `instruction`.

    The tokenizer fills in `second_segments`: for each pair, the index of its first token of token type 1; 0 for none.
    """

    body: PairsRequest
    pairs: Sequence[Pair]
    is_decoder: bool
    instruction: str
    second_segments: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pairs)


class Document(ClientModel):
    text: str


class RerankRequest(PairsRequest):
    """The body of POST /v1/rerank. `top_n` 0 means all."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"rank_fields": (["text"],), "max_chunks_per_doc": (1,)}

    query: str
    documents: Annotated[
        list[Annotated[str | Document, OneOf("a string or an object with text")]],
        fail_fast,
        at_most(MAX_DOCUMENTS, "documents"),
    ] = Field(min_length=1)
    top_n: int = Field(default=0, ge=0)
    return_documents: bool = True

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def pairs(self) -> list[Pair]:
        return [Pair(self.query, text, f"documents.{number}") for number, text in enumerate(self.texts())]


class CohereRerankRequest(RerankRequest):
    """The body of POST /v2/rerank: long documents are cut, and by default not returned."""

    return_documents: bool = False
    truncate: bool = True
    max_tokens_per_doc: int | None = Field(default=DEFAULT_TOKENS_PER_DOC, ge=1)


_Texts = Annotated[
    str | Annotated[list[str], fail_fast, at_most(MAX_DOCUMENTS, "texts")], OneOf("a string or an array of strings")
]


class ScoreRequest(PairsRequest):
    """The body of POST /v1/score: one `text_1` for all `text_2`, or as many of each."""

    text_1: _Texts
    text_2: _Texts

    @model_validator(mode="after")
    def _texts_are_pairs(self) -> Self:
        queries, documents = (len(each) if isinstance(each, list) else 1 for each in (self.text_1, self.text_2))
        if not queries or not documents or queries not in (1, documents):
            raise InvalidRequest(
                f"text_1 must be one text or as many as text_2, at least 1; got {queries}, and text_2 has {documents}.",
                param="text_1",
            )
        return self

    def pairs(self) -> list[Pair]:
        queries, documents = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        queries = queries * len(documents) if len(queries) == 1 else queries
        return [Pair(*each, f"text_2.{i}") for i, each in enumerate(zip(queries, documents, strict=True))]


class ClassifyRequest(ScoringRequest):
    """The body of POST /v1/classify."""

    input: Inputs
    add_special_tokens: bool = True

    def inputs(self, vocab_size: int) -> Prompts:
        """Return the inputs, text or token ids. Raises `InvalidRequest`."""
        inputs = prompt_list(self.input, "input")
        check_token_ids(inputs, vocab_size, "input")
        return inputs


class PoolingRequest(EmbeddingRequest):
    """The body of POST /v1/pooling: the vector of each token, for late interaction, or the pooled one."""

    unsupported: ClassVar[Mapping[str, Any]] = {**EmbeddingRequest.unsupported, "endianness": ("little", "native")}

    task: Literal["token_embed", "embed"] = "token_embed"

    def kind(self, default: str, *, is_encoder: bool) -> Pooling:
        if self.task == "embed":
            return super().kind(default, is_encoder=is_encoder)
        if self.pooling is not None:
            raise InvalidRequest("pooling needs task embed. Set task to embed, or leave pooling out.", param="pooling")
        return Pooling.TOKENS
