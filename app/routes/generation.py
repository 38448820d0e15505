"""POST /v1/chat/completions and /v1/completions: from a body to tokens to an answer."""

from __future__ import annotations

import math
import time

import anyio

from app.events import HEADERS_WITHIN, EventStream
from app.scope import Handler, RequestScope
from app.server import Server
from engine.errors import InvalidRequest
from engine.messages import EngineCoreRequest, SamplingParams
from engine.output_processor import RequestStream
from protocol.body import parse_body
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import GenerationRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.output import Collector, Head


def chat_completions(server: Server) -> Handler:
    """The handler of POST /v1/chat/completions."""

    async def handler(request: RequestScope) -> None:
        body = parse_body(ChatCompletionRequest, request.body)
        model_name = server.check_model_name(body.model)
        model = server.model
        sampling = body.to_sampling_params(model.measures.vocab_size)
        prompt = await model.prompts.encode_chat(body)
        head = Head(f"chatcmpl-{request.request_id}", int(time.time()), model_name)
        await _generate(server, request, body, head, [prompt], sampling, prompt_field="messages")

    return handler


def completions(server: Server) -> Handler:
    """The handler of POST /v1/completions."""

    async def handler(request: RequestScope) -> None:
        body = parse_body(CompletionRequest, request.body)
        model_name = server.check_model_name(body.model)
        model = server.model
        sampling = body.to_sampling_params(model.measures.vocab_size)
        prompts = [
            await model.prompts.encode_text(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts(model.measures.vocab_size)
        ]
        head = Head(f"cmpl-{request.request_id}", int(time.time()), model_name)
        await _generate(server, request, body, head, prompts, sampling, prompt_field="prompt")

    return handler


async def _generate(
    server: Server,
    request: RequestScope,
    body: GenerationRequest,
    head: Head,
    prompts: list[list[int]],
    sampling: SamplingParams,
    *,
    prompt_field: str,
) -> None:
    """Open the engine's stream for these prompts and answer from it."""
    llm = server.model.llm
    core_requests = [
        EngineCoreRequest(
            request_id=head.id if len(prompts) == 1 else f"{head.id}-{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_time=request.arrival_time,
            priority=body.priority,
            tenant=request.tenant,
        )
        for number, prompt in enumerate(prompts)
    ]
    token_bytes = llm.vocabulary.token_bytes
    try:
        async with llm.stream(*core_requests) as outputs:
            request.generation = outputs
            if body.stream:
                await _send_events(server, request, body, head, outputs)
            else:
                await _send_whole(request, body.collector(head, token_bytes), outputs)
    except InvalidRequest as error:
        if error.param == "prompt":
            error.param = prompt_field
        raise


async def _send_whole(request: RequestScope, collector: Collector, outputs: RequestStream) -> None:
    async for output in outputs:
        collector.feed(output)
    await request.send_json(200, collector.body())


async def _send_events(
    server: Server, request: RequestScope, body: GenerationRequest, head: Head, outputs: RequestStream
) -> None:
    chunks = body.chunk_stream(head, server.model.llm.vocabulary.token_bytes)
    events = EventStream(request, keep_alive=server.settings.sse_keep_alive or math.inf)
    with anyio.move_on_after(HEADERS_WITHIN) as patience:
        await outputs.wait()
    if patience.cancelled_caught:
        await events.start()
    async for output in outputs:
        frames = chunks.feed(output)  # raises for a failed output: before the first byte, that is a plain answer
        if not events.started:
            await events.start()
        if frames:
            await events.send(frames)
    await events.end(chunks.end())
