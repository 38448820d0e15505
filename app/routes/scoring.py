"""Scores of texts: reranking, pairs, classes, and the vectors of tokens for late interaction."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from app.http.scope import RequestScope
from app.routes.generation import embed
from app.serving.generation import GenerationTask, generate, new_head, parse, warn_of_left_out
from app.serving.model_server import ModelHandler, ModelServer
from engine.errors import InvalidRequest
from engine.messages import Pooling
from protocol.scoring.answers import LabelSet, PoolingWriter
from protocol.scoring.dialect import SCORING_ROUTES, ScoringRoute
from protocol.scoring.requests import (
    QWEN3_INSTRUCTION,
    ClassifyRequest,
    PairPrompts,
    PairsRequest,
    PoolingRequest,
    ScoringRequest,
)

if TYPE_CHECKING:
    from app.serving.prompts import Prompts


def scoring_handlers() -> Iterator[tuple[str, ModelHandler]]:
    """Yield the paths that answer with scores, with their POST handlers."""
    for route in SCORING_ROUTES:
        yield route.path, partial(_score, route)
    yield "/v1/pooling", _pool


async def _pool(server: ModelServer, request: RequestScope) -> None:
    body = await parse(server, PoolingRequest, request)
    await warn_of_left_out(server, request, body)
    await embed(server, request, body, partial(PoolingWriter, body))


async def _score(route: ScoringRoute, server: ModelServer, request: RequestScope) -> None:
    """Score every text, each as a request to the engine that generates nothing, or one token for a decoder."""
    body = await parse(server, route.request, request)
    await warn_of_left_out(server, request, body)
    head = new_head(server, request, route.id_prefix, body.model, body.request_id)
    labels = _labels(server, body)
    task = GenerationTask(
        head=head,
        body=await server.workload.read(request, partial(body.to_prefill, labels.token_ids)),
        pooling=None if labels.token_ids else Pooling.CLASSIFY,
        prompts=await server.workload.read(request, partial(_prompts, server, body, labels)),
        body_writer=partial(route.writer, body, labels),
    )
    await generate(server, request, task)


def _labels(server: ModelServer, body: ScoringRequest) -> LabelSet:
    labels = server.model.labels
    if labels is None:
        known = ", ".join(sorted(server.server.scoring_models))
        advice = f"Ask {known}" if known else "Serve one, such as Qwen/Qwen3-Reranker-0.6B or a cross-encoder"
        raise InvalidRequest(
            f"The model {server.name} gives no scores: it is neither a reranker nor a classifier. {advice}.",
            param="model",
        )
    if isinstance(body, PairsRequest):
        labels.check_scores_pairs()
        if body.instruction is not None and not labels.token_ids:
            raise InvalidRequest(
                "instruction needs a reranker that is a decoder; the served model reads none. Leave it out.",
                param="instruction",
            )
    return labels


def _prompts(server: ModelServer, body: ScoringRequest, labels: LabelSet) -> Prompts:
    if isinstance(body, PairsRequest):
        instruction = body.instruction or labels.instruction or QWEN3_INSTRUCTION
        return PairPrompts(body, body.pairs(), bool(labels.token_ids), instruction)
    assert isinstance(body, ClassifyRequest)
    return body.inputs(server.model.engine_info.vocab_size)
