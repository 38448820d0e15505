"""POST /v1/chat/completions and /v1/completions: from a body to tokens to an answer."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import anyio
from anyio import to_thread

from app.admission import Place
from app.events import HEADERS_WITHIN, EventStream
from app.scope import Handler, RequestScope
from app.server import ServedModel, Server
from engine.errors import InvalidRequest
from engine.messages import EngineCoreRequest, RequestOutput
from engine.output_processor import RequestStream
from protocol.body import M, parse_body
from protocol.errors import ApiError, deadline_exceeded
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import GenerationRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.output import Head

# Parsing and checking a body of 64 KiB takes about a millisecond.
INLINE_BODY_BYTES = 64 * 1024
# For admission, before anything is tokenized; the count replaces it afterwards.
CHARACTERS_PER_TOKEN = 4

Tokenize = Callable[[ServedModel], Awaitable[list[list[int]]]]


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What chat and completions have in common once their bodies are parsed."""

    body: GenerationRequest
    head: Head
    num_prompts: int
    num_characters: int
    tokenize: Tokenize


def chat_completions(server: Server) -> Handler:
    """The handler of POST /v1/chat/completions."""

    async def handler(request: RequestScope) -> None:
        body = await _parse(ChatCompletionRequest, request)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            return [await model.prompts.encode_chat(body, model.measures.max_model_len)]

        work = _Work(
            body=body,
            head=_head(server, "chatcmpl", request, body),
            num_prompts=1,
            num_characters=len(request.body),
            tokenize=tokenize,
        )
        await _generate(server, request, work)

    return handler


def completions(server: Server) -> Handler:
    """The handler of POST /v1/completions."""

    async def handler(request: RequestScope) -> None:
        body = await _parse(CompletionRequest, request)
        head = _head(server, "cmpl", request, body)
        prompts = body.prompts(server.model.measures.vocab_size)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            return [
                await model.prompts.encode_text(prompt, model.measures.max_model_len)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        work = _Work(
            body=body,
            head=head,
            num_prompts=len(prompts),
            num_characters=len(request.body),
            tokenize=tokenize,
        )
        await _generate(server, request, work)

    return handler


async def _parse(model: type[M], request: RequestScope) -> M:
    if len(request.body) <= INLINE_BODY_BYTES:
        return parse_body(model, request.body)
    return await to_thread.run_sync(parse_body, model, request.body)


def _head(server: Server, kind: str, request: RequestScope, body: GenerationRequest) -> Head:
    return Head(f"{kind}-{request.request_id}", int(time.time()), server.check_model_name(body.model))


async def _generate(server: Server, request: RequestScope, work: _Work) -> None:
    """Queue, tokenize, open the engine's stream, answer from it."""
    model = server.model
    body, head = work.body, work.head
    sampling = body.to_sampling_params(model.measures.vocab_size)
    deadline, first_token_deadline = _deadlines(server, request, body)
    patience = min(deadline, first_token_deadline) - time.monotonic()
    tenant = request.tenant
    with server.admission.queue(
        tenant,
        choices=body.n * work.num_prompts,
        tokens=work.num_characters // CHARACTERS_PER_TOKEN,
        patience=None if math.isinf(patience) else patience,
    ) as place:
        if not math.isinf(deadline):
            request.end_at(deadline, deadline_exceeded("The request did not finish in time."))
        prompts = await work.tokenize(model)
        place.count_tokens(sum(map(len, prompts)))
        core_requests = [
            EngineCoreRequest(
                request_id=head.id if len(prompts) == 1 else f"{head.id}-{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_time=request.arrival_time,
                priority=body.priority,
                deadline=None if math.isinf(deadline) else deadline,
                first_token_deadline=None if math.isinf(first_token_deadline) else first_token_deadline,
                tenant=tenant.name,
                tenant_weight=tenant.weight,
                tenant_max_running=tenant.max_running or 0,
            )
            for number, prompt in enumerate(prompts)
        ]
        try:
            async with model.llm.stream(*core_requests) as outputs:
                request.generation = outputs
                answer = _send_events if body.stream else _send_whole
                await answer(server, request, work, outputs, place)
        except InvalidRequest as error:
            raise body.in_client_words(error) from None


async def _send_whole(server: Server, request: RequestScope, work: _Work, outputs: RequestStream, place: Place) -> None:
    collector = work.body.collector(work.head, server.model.llm.vocabulary.token_bytes)
    await outputs.wait()
    place.leave(started=True)
    await outputs.wait_finished()
    async for output in outputs:
        collector.feed(output)
    await request.send_json(200, collector.body())


async def _send_events(
    server: Server, request: RequestScope, work: _Work, outputs: RequestStream, place: Place
) -> None:
    settings = server.settings
    chunks = work.body.chunk_stream(work.head, server.model.llm.vocabulary.token_bytes, outputs.prompt_lengths)
    events = EventStream(
        request,
        keep_alive=settings.sse_keep_alive or math.inf,
        last_words=lambda error: chunks.fail(error, outputs.drain()),
    )
    with anyio.move_on_after(HEADERS_WITHIN) as patience:
        await outputs.wait()
    if patience.cancelled_caught:
        await events.start()

    def forward(deltas: Collection[RequestOutput]) -> bool:
        """Send what a step has brought right away, unless it ends a choice or the client lags."""
        if not events.takes_more or any(delta.finish_reason is not None for delta in deltas):
            return False
        if frames := b"".join(map(chunks.feed, deltas)):
            events.send_now(frames)
        return True

    async for output in outputs:
        place.leave(started=True)
        outputs.listen(forward)  # not before the first output, which is what leaves the queue
        frames = chunks.feed(output)  # raises for a failed output: before the first byte, that is a plain answer
        if not events.started:
            await events.start()
        if frames:
            await events.send(frames)
    await events.end(chunks.end())


def _deadlines(server: Server, request: RequestScope, body: GenerationRequest) -> tuple[float, float]:
    """When the request must have ended and when its first token must have come; infinity for never.

    The body's `timeout` and the header `X-Request-Timeout` both count, the shorter one wins. Raises ApiError 400.
    """
    settings = server.settings
    asked = [seconds for seconds in (body.timeout, _header_timeout(request)) if seconds is not None]
    timeout = min(asked) if asked else settings.default_timeout
    ttft_timeout = body.ttft_timeout if body.ttft_timeout is not None else settings.default_ttft_timeout
    start, longest = request.arrival_time, settings.max_timeout
    return (
        math.inf if timeout is None else start + min(timeout, longest),
        math.inf if ttft_timeout is None else start + min(ttft_timeout, longest),
    )


def _header_timeout(request: RequestScope) -> float | None:
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(
            400,
            f"The header X-Request-Timeout must be a number of seconds above 0, got {given[:20]!r}.",
            param="X-Request-Timeout",
        )
    return seconds
