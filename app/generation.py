"""From a parsed body to tokens to an answer, for every wire format.

A route says what it wants in a `GenerationTask`: the knobs, how to tokenize, and who writes the answer. Everything
between is here once, so that a place in the queue, deadlines, cancellation, keep-alive and slow readers hold on every
route.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from app.events import HEADERS_WITHIN, EventStream
from app.scope import RequestScope
from app.server import ServedModel, Server
from app.workload import INLINE_ANSWER, weight_of
from engine.errors import InvalidRequest
from engine.frontend.output_processor import RequestStream
from engine.messages import EngineCoreRequest, Pooling, RequestOutput
from protocol.body import M, parse_body
from protocol.errors import ApiError, deadline_exceeded
from protocol.message_parts import MessageFormat
from protocol.message_syntax import PROMPT_TAIL
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import MAX_PRIORITY, GenerationRequest

# For admission, before anything is tokenized; the count replaces it afterwards.
CHARACTERS_PER_TOKEN = 4

# Seconds that the reader of a stream may write at a stretch before others have their turn.
WRITING_TURN = 0.005

Tokenize = Callable[[ServedModel], Awaitable[list[list[int]]]]


class EventWriter(Protocol):
    """Turns the outputs of one request into the frames of its event stream."""

    def feed(self, output: RequestOutput) -> bytes:
        """The frames that `output` gives, possibly none. Raises ApiError if the output failed."""
        ...

    def end(self) -> bytes:
        """The last frames, after every choice has finished."""
        ...

    def fail(self, error: ApiError, unsent: Iterable[RequestOutput]) -> bytes:
        """The last frames if something goes wrong. `unsent` has been generated and will not be fed."""
        ...


class BodyWriter(Protocol):
    """Turns the outputs of one request into its one response body."""

    def feed(self, output: RequestOutput) -> None:
        """Take in the next part of a choice. Raises ApiError if the output failed."""
        ...

    def body(self) -> bytes:
        """The response body, after every choice has finished."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """What one HTTP request wants of the engine, and who writes its answer.

    `body` has the knobs; a wire format of its own translates into it. `num_characters` estimates the prompts' length
    until `tokenize` has counted it. One of the two writers is made, by `body.stream`, when the engine's stream is open.
    """

    request_id: str
    body: GenerationRequest
    pooling: Pooling | None = None
    num_prompts: int = 1
    num_characters: int
    tokenize: Tokenize
    event_writer: Callable[[RequestStream], EventWriter] | None = None  # None: its body never asks for a stream
    body_writer: Callable[[RequestStream], BodyWriter]


async def parse(server: Server, model: type[M], request: RequestScope) -> M:
    """The request's body, checked against `model`, on a worker thread if it is long. Raises ApiError 400."""
    return await server.workload.read(request, lambda: parse_body(model, request.body))


def message_format(model: ServedModel, body: GenerationRequest, outputs: RequestStream) -> MessageFormat:
    """How the answer to `body` is read into parts. A completion is text and nothing else."""
    if not isinstance(body, ChatCompletionRequest):
        return MessageFormat()
    return body.message_format(model.prompts.syntax, _prompt_end(model, outputs.prompts[0]))


def _prompt_end(model: ServedModel, prompt: list[int]) -> bytes:
    """The text that tells whether a prompt has begun the answer's reasoning."""
    return b"".join(map(model.llm.vocabulary.token_bytes, prompt[-PROMPT_TAIL:]))


def take_request_id(request: RequestScope, given: str | None) -> str:
    """The request's id, which a body may give where no header does."""
    if given is not None and "x-request-id" not in request.headers:
        request.request_id = given
    return request.request_id


def encode_prompts(
    prompts: Sequence[str | list[int]],
    param: str,
    *,
    add_special_tokens: bool,
    truncated: Callable[[list[int], int], list[int]],
) -> Tokenize:
    """A `Tokenize` for texts and token ids. `truncated` cuts token ids, given the longest context."""

    async def tokenize(model: ServedModel) -> list[list[int]]:
        longest = model.engine_info.max_model_len
        token_ids = await model.prompts.encode_texts(
            prompts, longest, param=param, add_special_tokens=add_special_tokens
        )
        return [truncated(each, longest) for each in token_ids]

    return tokenize


async def generate(server: Server, request: RequestScope, work: GenerationTask) -> None:
    """Queue, tokenize, open the engine's stream, answer from it.

    Raises InvalidRequest in the words of `work.body`, and ApiError.
    """
    try:
        await _generate(server, request, work)
    except InvalidRequest as error:
        raise work.body.in_client_words(error) from None


async def _generate(server: Server, request: RequestScope, work: GenerationTask) -> None:
    model = server.model
    body = work.body
    request.answer_id = work.request_id
    sampling = await server.workload.read(request, lambda: body.to_sampling_params(model.engine_info.vocab_size))
    deadline, first_token_deadline = _deadlines(server, request, body)
    timeout = min(deadline, first_token_deadline) - time.monotonic()
    priority = body.priority if "priority" in body.model_fields_set else _header_priority(request)
    tenant = request.tenant
    with server.admission.queue(
        tenant,
        choices=body.n * work.num_prompts,
        tokens=work.num_characters // CHARACTERS_PER_TOKEN,
        timeout=None if math.isinf(timeout) else timeout,
    ) as ticket:
        if not math.isinf(deadline):
            request.end_at(deadline, deadline_exceeded("The request did not finish in time."))
        prompts = await work.tokenize(model)
        if isinstance(body, ChatCompletionRequest):
            sampling = await server.workload.read(
                request, partial(body.with_syntax, sampling, model.prompts.syntax, _prompt_end(model, prompts[0]))
            )
        num_prompt_tokens = sum(map(len, prompts))
        ticket.count_tokens(num_prompt_tokens)
        body.check_prompt_logprobs(num_prompt_tokens)
        core_requests = [
            EngineCoreRequest(
                request_id=work.request_id if len(prompts) == 1 else f"{work.request_id}-{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_time=request.arrival_time,
                priority=priority,
                precedence=tenant.precedence(priority),
                deadline=None if math.isinf(deadline) else deadline,
                first_token_deadline=None if math.isinf(first_token_deadline) else first_token_deadline,
                tenant=tenant.name,
                tenant_weight=tenant.weight,
                tenant_max_running=tenant.max_running or 0,
                cache_salt=body.cache_salt or "",
                pooling=work.pooling,
            )
            for number, prompt in enumerate(prompts)
        ]
        async with model.llm.stream(*core_requests) as outputs:
            request.outputs = outputs
            outputs.on_begin = ticket.begin
            answer = _send_events if body.stream else _send_whole
            await answer(server, request, work, outputs)


async def _send_whole(server: Server, request: RequestScope, work: GenerationTask, outputs: RequestStream) -> None:
    await outputs.wait_finished()
    deltas = outputs.drain()
    if outputs.error is not None:
        raise outputs.error

    def write() -> bytes:
        writer = work.body_writer(outputs)
        for output in deltas:
            writer.feed(output)
        return writer.body()

    weight = weight_of(deltas) + _weight_of_prompts(work.body, outputs)
    await request.send_json(200, await server.workload.write(weight, write))


def _weight_of_prompts(body: GenerationRequest, outputs: RequestStream) -> int:
    """How much of an answer repeats prompts."""
    return outputs.num_prompt_tokens if body.echo or body.return_token_ids else 0


async def _send_events(server: Server, request: RequestScope, work: GenerationTask, outputs: RequestStream) -> None:
    settings = server.settings
    assert work.event_writer is not None
    writer = await server.workload.write(_weight_of_prompts(work.body, outputs), partial(work.event_writer, outputs))
    events = EventStream(
        request,
        keep_alive=settings.sse_keep_alive or math.inf,
        error_frame=lambda error: writer.fail(error, outputs.drain()),
    )
    with anyio.move_on_after(HEADERS_WITHIN) as wait:
        await outputs.wait()
    if wait.cancelled_caught:
        await events.start()

    def forward(deltas: Collection[RequestOutput]) -> bool:
        """Send what a step has brought right away, unless it ends a choice or the client lags."""
        if not events.takes_more or any(delta.finish_reason is not None for delta in deltas):
            return False
        if outputs.logprobs_per_token and weight_of(deltas) > INLINE_ANSWER:
            return False
        if frames := b"".join(map(writer.feed, deltas)):
            events.send_now(frames)
        return True

    turn_began = time.perf_counter()
    async for output in outputs:
        outputs.listen(None)  # nor may it write while this does
        weight = weight_of([output])
        # Raises for a failed output: before the first byte, that is a plain answer.
        frames = await server.workload.write(weight, partial(writer.feed, output))
        outputs.listen(forward)
        if not events.started:
            await events.start()
        if frames:
            await events.send(frames)
        if time.perf_counter() - turn_began > WRITING_TURN:
            await checkpoint()
            turn_began = time.perf_counter()
    weight = outputs.num_output_tokens * (1 + outputs.logprobs_per_token)
    await events.end(await server.workload.write(weight, writer.end))


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


def _header_priority(request: RequestScope) -> int:
    given = request.headers.get("x-vllm-priority", "0")
    try:
        priority = int(given[:20])
    except ValueError:
        priority = MAX_PRIORITY + 1
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ApiError(
            400,
            f"The header X-Vllm-Priority must be a whole number, at most {MAX_PRIORITY}, got {given[:20]!r}.",
            param="X-Vllm-Priority",
        )
    return priority


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
