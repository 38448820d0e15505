"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time

from app.generation import Generation, Tokenize, generate, parse
from app.scope import Handler, RequestScope
from app.server import ServedModel, Server
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import GenerationRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.output import Head


def chat_completions(server: Server) -> Handler:
    """The handler of POST /v1/chat/completions."""

    async def handler(request: RequestScope) -> None:
        body = await parse(ChatCompletionRequest, request)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            return [await model.prompts.encode_chat(body, model.measures.max_model_len)]

        await _generate(server, request, body, "chatcmpl", num_prompts=1, tokenize=tokenize)

    return handler


def completions(server: Server) -> Handler:
    """The handler of POST /v1/completions."""

    async def handler(request: RequestScope) -> None:
        body = await parse(CompletionRequest, request)
        prompts = body.prompts(server.model.measures.vocab_size)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            return [
                await model.prompts.encode_text(prompt, model.measures.max_model_len)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        await _generate(server, request, body, "cmpl", num_prompts=len(prompts), tokenize=tokenize)

    return handler


async def _generate(
    server: Server,
    request: RequestScope,
    body: GenerationRequest,
    kind: str,
    *,
    num_prompts: int,
    tokenize: Tokenize,
) -> None:
    head = Head(f"{kind}-{request.request_id}", int(time.time()), server.check_model_name(body.model))
    token_bytes = server.model.llm.vocabulary.token_bytes
    work = Generation(
        request_id=head.id,
        body=body,
        num_prompts=num_prompts,
        num_characters=len(request.body),
        tokenize=tokenize,
        event_writer=lambda outputs: body.chunk_stream(head, token_bytes, outputs.prompt_lengths),
        body_writer=lambda outputs: body.collector(head, token_bytes),
    )
    await generate(server, request, work)
