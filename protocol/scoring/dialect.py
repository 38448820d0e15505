"""The dialect's record: its paths, and errors that Cohere's, Jina's and OpenAI's clients read.

Each path has one request class and one writer class. Errors have OpenAI's envelope, and repeat its message at the top
level: as `message` for Cohere's clients, and as `detail` for Jina's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from msgspec import Struct

from protocol.answers import AnswerContext, BodyWriter, ErrorEnvelope
from protocol.errors import ApiError
from protocol.operations import Dialect, generates
from protocol.scoring.answers import (
    ClassificationList,
    ClassificationWriter,
    LabelSet,
    PooledList,
    Reranking,
    RerankWriter,
    ScoreList,
    ScoreWriter,
)
from protocol.scoring.requests import (
    ClassifyRequest,
    CohereRerankRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringRequest,
)


@dataclass(frozen=True)
class ScoringRoute:
    """A path that answers with scores. The ids of its answers begin with `id_prefix`."""

    path: str
    summary: str
    request: type[ScoringRequest]
    answer: type[Struct]
    writer: Callable[[Any, LabelSet, AnswerContext], BodyWriter]
    id_prefix: str


class ScoringError(ErrorEnvelope):
    """The body of an error."""

    message: str
    detail: str


def _error_body(error: ApiError, request_id: str | None) -> bytes:
    return orjson.dumps({**error.envelope(), "message": error.message, "detail": error.message})


_RERANK = "Order documents by their relevance for a query."
_SCORE = "The score of each pair of texts."
_CLASSIFY = "The probabilities of a classifier's labels."
_POOLING = "The vectors of a text's tokens, or the pooled one."

SCORING_ROUTES = (
    ScoringRoute("/v1/rerank", _RERANK, RerankRequest, Reranking, RerankWriter, "rerank-"),
    ScoringRoute(
        "/v2/rerank", f"{_RERANK[:-1]}, as Cohere does.", CohereRerankRequest, Reranking, RerankWriter, "rerank-"
    ),
    ScoringRoute("/v1/score", _SCORE, ScoreRequest, ScoreList, ScoreWriter, "score-"),
    ScoringRoute("/v1/classify", _CLASSIFY, ClassifyRequest, ClassificationList, ClassificationWriter, "classify-"),
)

SCORING = Dialect(
    root="/v1/rerank",
    more_roots=("/v2", "/v1/score", "/v1/classify", "/v1/pooling"),
    others=(
        *(generates(each.path, each.summary, each.request, each.answer, streams=False) for each in SCORING_ROUTES),
        generates("/v1/pooling", _POOLING, PoolingRequest, PooledList, streams=False),
    ),
    error_body=_error_body,
    error_answer=ScoringError,
)
