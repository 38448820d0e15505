"""POST /v1/embeddings."""

from __future__ import annotations

import time

from app.generation import GenerationTask, encode_prompts, generate, parse, take_request_id
from app.scope import Handler, RequestScope
from app.server import Server
from engine.messages import Pooling
from protocol.openai.embeddings import EmbeddingRequest, EmbeddingWriter
from protocol.openai.output import Head


def embeddings(server: Server) -> Handler:
    """The handler of POST /v1/embeddings: each input is a request of its own to the engine, and generates nothing."""

    async def handler(request: RequestScope) -> None:
        body = await parse(server, EmbeddingRequest, request)
        model = server.model
        inputs = await server.workload.read(request, lambda: body.inputs(model.engine_info.vocab_size))
        body.check_dimensions(model.embedding_size)
        prefill = await server.workload.read(request, body.to_prefill)
        request_id = take_request_id(request, body.request_id)
        head = Head(f"embd-{request_id}", int(time.time()), server.check_model_name(body.model))
        work = GenerationTask(
            request_id=head.id,
            body=prefill,
            pooling=Pooling(body.pooling or server.settings.embedding_pooling),
            num_prompts=len(inputs),
            num_characters=len(request.body),
            tokenize=encode_prompts(
                inputs, "input", add_special_tokens=body.add_special_tokens, truncated=prefill.truncated
            ),
            body_writer=lambda outputs: EmbeddingWriter(body, head),
        )
        await generate(server, request, work)

    return handler
