"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time

from app.generation import GenerationTask, Tokenize, encode_prompts, generate, message_format, parse, take_request_id
from app.scope import Handler, RequestScope
from app.server import ServedModel, Server
from engine.frontend.output_processor import RequestStream
from protocol.message_parts import MessageFormat
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import GenerationRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.output import Head
from protocol.openai.prompt_parts import PromptParts


def chat_completions(server: Server) -> Handler:
    """The handler of POST /v1/chat/completions."""

    async def handler(request: RequestScope) -> None:
        body = await parse(server, ChatCompletionRequest, request)
        body.check_template_kwargs(server.settings.template_kwargs)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            longest = model.engine_info.max_model_len
            return [body.truncated(await model.prompts.encode_chat(body, longest), longest)]

        await _generate(server, request, body, "chatcmpl", num_prompts=1, tokenize=tokenize)

    return handler


def completions(server: Server) -> Handler:
    """The handler of POST /v1/completions."""

    async def handler(request: RequestScope) -> None:
        body = await parse(server, CompletionRequest, request)
        vocab_size = server.model.engine_info.vocab_size
        prompts = await server.workload.read(request, lambda: body.prompts(vocab_size))

        tokenize = encode_prompts(
            prompts, "prompt", add_special_tokens=body.add_special_tokens, truncated=body.truncated
        )
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
    head = Head(
        f"{kind}-{take_request_id(request, body.request_id)}", int(time.time()), server.check_model_name(body.model)
    )
    model = server.model
    token_bytes, decode = model.llm.vocabulary.token_bytes, model.prompts.decode

    def parts(outputs: RequestStream) -> PromptParts | None:
        return body.prompt_parts(outputs.prompts, decode)

    def form(outputs: RequestStream) -> MessageFormat:
        return message_format(model, body, outputs)

    work = GenerationTask(
        request_id=head.id,
        body=body,
        num_prompts=num_prompts,
        num_characters=len(request.body),
        tokenize=tokenize,
        event_writer=lambda outputs: body.chunk_stream(
            head, token_bytes, outputs.prompt_lengths, parts(outputs), message_format=form(outputs)
        ),
        body_writer=lambda outputs: body.collector(head, token_bytes, parts(outputs), message_format=form(outputs)),
    )
    await generate(server, request, work)
