"""POST /v1/embeddings."""

from __future__ import annotations

from functools import partial

from app.generation import GenerationTask, encode_conversation, encode_prompts, generate, new_head, parse, tell_left_out
from app.scope import RequestScope
from app.server import Server
from engine.messages import Pooling
from protocol.openai.embeddings import EmbeddingBodyWriter, EmbeddingRequest


async def embeddings(server: Server, request: RequestScope) -> None:
    """POST /v1/embeddings: each input is a request of its own to the engine, and generates nothing."""
    body = await parse(server, EmbeddingRequest, request)
    tell_left_out(server, request, body.left_out)
    model = server.model
    embedder = model.embedder
    conversation = await server.workload.read(request, body.conversation)
    if conversation is None:
        inputs = await server.workload.read(
            request, lambda: body.inputs(model.engine_info.vocab_size, embedder.prompts, embedder.default_prompt)
        )
    else:
        inputs = []
        conversation.check_template_kwargs(server.settings.template_kwargs)
        tell_left_out(server, request, conversation.left_out._replace(fields=body.without_effect))
    body.check_dimensions(model.embedding_size)
    prefill = await server.workload.read(request, body.to_prefill)
    head = new_head(server, request, "embd-", body.model, body.request_id)
    task = GenerationTask(
        head=head,
        body=prefill,
        pooling=Pooling(body.pooling or server.settings.embedding_pooling or embedder.pooling or "mean"),
        num_prompts=1 if conversation else len(inputs),
        num_characters=len(request.body),
        tokenize=(
            encode_conversation(conversation)
            if conversation
            else encode_prompts(inputs, prefill, add_special_tokens=body.add_special_tokens)
        ),
        body_writer=partial(EmbeddingBodyWriter, body),
    )
    await generate(server, request, task)
