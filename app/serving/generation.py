"""The path of a generation request, for every wire format: queue, tokenize, check, submit to the engine, answer.

A route describes its request as a `GenerationTask`. Queue places, deadlines, cancellation, keep-alive and backpressure
are handled here once, so they hold on every route.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from app.admission.admission import QueueTicket
from app.http.record import MAX_CHARACTERS, MAX_MESSAGES, Phase, Transcript
from app.http.scope import RequestScope
from app.runtime import INLINE_ANSWER, weight_of, weight_so_far
from app.serving.model_server import ModelServer, ServedModel
from engine.errors import InvalidRequest, PromptTooLong
from engine.frontend.request_stream import RequestStream
from engine.messages import BATCH_PRECEDENCE, EngineCoreRequest, Pooling, RequestOutput, SamplingParams
from protocol.answers import CONTENT_TYPE, AnswerContext, BodyWriter, Head, StreamWriter
from protocol.body import M, parse_body
from protocol.errors import ApiError, deadline_exceeded
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.embeddings import PrefillRequest
from protocol.openai.generation import GenerationRequest
from protocol.request_fields import MAX_PRIORITY, TruncatedPrompt
from protocol.scoring.requests import PairPrompts
from protocol.syntax.reasoning import PROMPT_TAIL
from protocol.tools.unsupported import IgnoredParts

if TYPE_CHECKING:
    from app.serving.prompts import Prompts

# The estimate that admission uses until the prompt is tokenized.
CHARACTERS_PER_TOKEN = 4

# Seconds after which a stream's headers are sent even if there is no output yet. A request that fails sooner is
# answered with a plain status, and one that waits in the queue for longer is not mistaken for a dead server.
HEADERS_WITHIN = 0.1

# Seconds for which the reader of one stream may write before it yields to others.
WRITING_TURN = 0.005

# The field that forbids writing the prompt to a disk. Inside a JSON string its quotes would be escaped.
_IN_MEMORY = re.compile(rb'"prompt_cache_retention"\s*:\s*"in[-_]memory"')
BATCH_SUFFIX = "\0batch"  # of a tenant's name; no tenant's own name has a null character
COUNTED_CONTEXTS = 4  # the longest conversation that is tokenized for counting, in contexts

Deadlines = tuple[float | None, float | None]  # of the whole answer and of its first token, in `time.monotonic()`


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """The description of one generation request: prompts, sampling fields and the writers of its answer.

    `body` has the sampling fields. One of the writers is made, by `body.stream`, when the engine's stream is open.
    """

    head: Head
    body: GenerationRequest
    prompts: Prompts
    cuts_to_fit: bool = False  # leave out the oldest turns of a conversation that is too long
    pooling: Pooling | None = None
    num_unpooled: int = 0  # tokens at the start of each prompt that pooling by mean leaves out
    keeps_prefix: bool = False  # the conversation may be continued
    stream_writer: Callable[[AnswerContext], StreamWriter] | None = None  # None: the body never asks for a stream
    body_writer: Callable[[AnswerContext], BodyWriter]


async def parse(server: ModelServer, model: type[M], request: RequestScope) -> M:
    """Return the request's body, checked against `model`; a long one is parsed on a worker thread. Raises ApiError 400,
    and 503 while no model is loaded."""
    _ = server.model
    return await server.workload.read(request, lambda: parse_body(model, request.body))


async def warn_of_left_out(
    server: ModelServer, request: RequestScope, given: TruncatedPrompt, body: object = None, fields: Sequence[str] = ()
) -> None:
    """Set the warning header for the parts of `given` that have no effect, for more `fields`, and for the fields of a
    conversation that the model's chat template does not read."""
    left_out = await server.workload.read(request, lambda: given.left_out)
    if fields:
        left_out = left_out._replace(fields=tuple(fields))
    if isinstance(body, ChatCompletionRequest):
        syntax = server.model.prompts.syntax
        unread = syntax.unread_fields(body.documents, body.chat_template_kwargs, body.reasoning_effort)
        left_out = left_out._replace(unread=unread, grammars=body.lark_tools)
    server.metrics.on_tools_left_out(left_out.tools)
    request.warn(left_out.warning())


def new_head(
    server: ModelServer, request: RequestScope, id_prefix: str, model: str | None, given: str | None = None
) -> Head:
    """Return the id, time and model name of an answer. `given` is the request id of the body, for a request without
    that header.

    Raises ApiError 404 for a model that is not served.
    """
    if given is not None and "x-request-id" not in request.headers:
        request.request_id = given
    return Head(f"{id_prefix}{request.request_id}", int(time.time()), server.check_model_name(model))


async def count_tokens(server: ModelServer, chat: ChatCompletionRequest) -> int:
    """Return the number of tokens of a conversation, even of one that is too long: clients ask to find out."""
    chat.check_template_kwargs(server.settings.template_kwargs)
    model = server.model
    longest = model.engine_info.max_model_len
    try:
        return len(await model.prompts.encode_chat(chat, COUNTED_CONTEXTS * longest))
    except PromptTooLong as error:
        raise chat.in_client_words(
            PromptTooLong(error.num_tokens, longest, param=error.param or "messages", is_exact=False)
        ) from None


async def generate(server: ModelServer, request: RequestScope, task: GenerationTask) -> None:
    """Queue, tokenize, check, submit, and answer from the engine's stream.

    Raises InvalidRequest with the field names of `task.body`, and ApiError.
    """
    try:
        await _generate(server, request, task)
    except InvalidRequest as error:
        raise task.body.in_client_words(error) from None


async def _generate(server: ModelServer, request: RequestScope, task: GenerationTask) -> None:
    model, body, read = server.model, task.body, partial(server.workload.read, request)
    if task.pooling is None and model.engine_info.facts.is_encoder:
        raise ApiError(
            400,
            f"The model {task.head.model!r} is an encoder, which generates no text. It serves /v1/embeddings.",
            param="model",
            code="model_not_supported",
        )
    request.answer_id = task.head.id
    sampling = await read(lambda: body.to_sampling_params(model.engine_info.vocab_size))
    deadlines = _deadlines(server, request, body)
    priority = body.priority if "priority" in body.model_fields_set else _header_priority(request)
    with _queue(server, request, task, sampling, deadlines) as ticket:
        if (deadline := deadlines[0]) is not None:
            request.end_at(deadline, deadline_exceeded("The request did not finish in time."))
        request.mark(Phase.TOKENIZE)
        prompts = await model.prompts.encode(
            body, task.prompts, model.engine_info.max_model_len, cuts_to_fit=task.cuts_to_fit
        )
        request.mark(Phase.CHECK)
        ticket.count_tokens(sum(map(len, prompts)))
        prompt_end = b"".join(map(model.llm.vocabulary.token_bytes, prompts[0][-PROMPT_TAIL:]))
        sampling = await read(partial(body.with_syntax, sampling, model.prompts.syntax, prompt_end))
        core_requests = _core_requests(server, request, task, prompts, sampling, deadlines, priority)
        if sampling.structured_output is not None:
            request.mark(Phase.COMPILE_GRAMMAR)
        async with model.llm.stream(*core_requests, begins_message=body.begins_message) as outputs:
            request.warn(IgnoredParts(keywords=outputs.unenforced).warning())
            request.attend(outputs)
            outputs.on_begin, outputs.on_end = ticket.begin, ticket.end
            ticket.attend(lambda: outputs.num_output_tokens)
            answer = _answer_context(request, task, model, outputs, prompt_end)
            send = _send_stream if body.stream else _send_whole
            await send(server, request, task, outputs, answer)


def _queue(
    server: ModelServer, request: RequestScope, task: GenerationTask, sampling: SamplingParams, deadlines: Deadlines
) -> AbstractContextManager[QueueTicket]:
    if request.is_batch:
        return server.admission.unqueued(request.tenant)
    times = [each for each in deadlines if each is not None]
    choices = task.body.n * len(task.prompts)
    if isinstance(
        task.body, PrefillRequest
    ):  # the queue takes thousands of inputs as one request, which they pass in turn
        places = min(server.settings.max_queued_requests, request.tenant.max_queued_requests or math.inf)
        choices = min(choices, max(1, int(places // 8)))
    return server.admission.queue(
        request.tenant,
        choices=choices,
        tokens=len(request.body) // CHARACTERS_PER_TOKEN,
        timeout=min(times) - time.monotonic() if times else None,
        max_tokens=0 if task.pooling is not None else sampling.max_tokens,
    )


def _core_requests(
    server: ModelServer,
    request: RequestScope,
    task: GenerationTask,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    deadlines: Deadlines,
    priority: int,
) -> list[EngineCoreRequest]:
    """Check the prompts against the model and return a request to the engine for each. Raises InvalidRequest."""
    model, tenant, body = server.model, request.tenant, task.body
    # The engine counts rows of batches apart, so that they take nothing of the tenant's share or running slots.
    counted_as, precedence = tenant.name, tenant.precedence(priority)
    if request.is_batch:
        counted_as, precedence = tenant.name + BATCH_SUFFIX, BATCH_PRECEDENCE
    info = model.engine_info
    body.check_outputs(list(map(len, prompts)), vocab_size=info.vocab_size, max_model_len=info.max_model_len)
    segments = task.prompts.second_segments if isinstance(task.prompts, PairPrompts) else []
    is_private = _IN_MEMORY.search(request.body) is not None  # once for all prompts: the body may be long
    if server.settings.trace_messages and not is_private and request.span is not None:
        request.transcript = _transcript(body, prompts, model.prompts.decode)
    return [
        EngineCoreRequest(
            request_id=task.head.id if len(prompts) == 1 else f"{task.head.id}-{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_time=request.arrival_time,
            priority=priority,
            precedence=precedence,
            deadline=deadlines[0],
            first_token_deadline=deadlines[1],
            tenant=counted_as,
            tenant_weight=tenant.weight,
            tenant_max_running=tenant.max_running or 0,
            cache_salt=body.cache_salt or "",
            pooling=task.pooling,
            second_segment=segments[number] if segments else 0,
            num_unpooled=task.num_unpooled,
            keeps_prefix=task.keeps_prefix,
            is_private=is_private,
        )
        for number, prompt in enumerate(prompts)
    ]


def _answer_context(
    request: RequestScope, task: GenerationTask, model: ServedModel, outputs: RequestStream, prompt_end: bytes
) -> AnswerContext:
    vocabulary = model.llm.vocabulary
    return AnswerContext(
        head=task.head,
        request_id=request.request_id,
        prompts=outputs.prompts,
        token_bytes=vocabulary.token_bytes,
        decode=model.prompts.decode,
        message_format=task.body.message_format(model.prompts.syntax, prompt_end),
        hidden_ids=vocabulary.special_ids if task.body.skip_special_tokens else frozenset(),
        fingerprint=model.fingerprint,
        durations=outputs.durations,
    )


def _transcript(
    body: GenerationRequest, prompts: Sequence[list[int]], decode: Callable[[list[int]], str]
) -> Transcript:
    if isinstance(body, ChatCompletionRequest):
        return Transcript((each["role"], each.get("content") or "") for each in body.messages_for_template())
    return Transcript(("user", decode(each[:MAX_CHARACTERS])) for each in prompts[:MAX_MESSAGES])


async def _send_whole(
    server: ModelServer, request: RequestScope, task: GenerationTask, outputs: RequestStream, answer: AnswerContext
) -> None:
    await outputs.wait_finished()
    deltas = outputs.drain()
    if outputs.error is not None:
        raise outputs.error

    def write() -> bytes:
        writer = task.body_writer(answer)
        feed: Callable[[RequestOutput], object] = writer.feed_output
        if request.transcript is not None:
            feed = request.transcript.before(feed)
        for output in deltas:
            feed(output)
        return writer.body()

    weight = weight_of(deltas) + _weight_of_prompts(task.body, outputs)
    body = await server.workload.write(weight, write)
    await request.send_json(200, body)


def _weight_of_prompts(body: GenerationRequest, outputs: RequestStream) -> int:
    """Return the number of prompt tokens that the answer repeats."""
    return outputs.num_prompt_tokens if body.echo or body.return_token_ids else 0


async def _send_stream(
    server: ModelServer, request: RequestScope, task: GenerationTask, outputs: RequestStream, answer: AnswerContext
) -> None:
    assert task.stream_writer is not None
    writer = await server.workload.write(_weight_of_prompts(task.body, outputs), partial(task.stream_writer, answer))
    feed: Callable[[RequestOutput], bytes] = writer.feed_output
    if request.transcript is not None:
        feed = request.transcript.before(feed)

    async def fail(error: ApiError) -> bytes:
        unsent = outputs.drain()
        return await server.workload.write(weight_so_far(outputs), lambda: writer.fail_stream(error, unsent))

    start = partial(
        request.start_stream,
        request.dialect.stream_type,
        error_frame=fail,
        keep_alive=(server.settings.sse_keep_alive or math.inf, request.dialect.keep_alive),
    )
    if request.status is None:
        if not await _has_begun(outputs):
            await start()
    elif request.warning is not None and request.dialect.stream_type == CONTENT_TYPE:  # the header came too late
        await request.send_chunk(f": x-headrace-warning: {request.warning}\n\n".encode())

    def forward(deltas: Collection[RequestOutput]) -> bool:
        """Write the outputs of a step at once. Return False, without writing, if they end a choice, are too long, or
        the client lags."""
        if not request.takes_more:
            return False
        for delta in deltas:
            if delta.finish_reason is not None:
                return False
        if outputs.logprobs_per_token and weight_of(deltas) > INLINE_ANSWER:
            return False
        if frames := b"".join(map(feed, deltas)):
            request.send_chunk_now(frames)
        return True

    frames = b""
    turn_began = time.perf_counter()
    async for output in outputs:
        outputs.listen(None)  # `forward` must not write in the meantime
        weight = weight_of([output])
        # Raises for a failed output, which is answered with a plain status if nothing was sent.
        frames = await server.workload.write(weight, partial(feed, output))
        outputs.listen(forward)
        if outputs.is_drained:
            break  # so that these frames and the end are one chunk
        if request.status is None:
            await start(more_follows=bool(frames))
        if frames:
            await request.send_chunk(frames)
        frames = b""
        if time.perf_counter() - turn_began > WRITING_TURN:
            await checkpoint()
            turn_began = time.perf_counter()
    frames += await server.workload.write(weight_so_far(outputs), writer.finish_stream)
    if request.status is None:
        await start(more_follows=True)
    await request.end_stream(frames)


async def _has_begun(outputs: RequestStream) -> bool:
    """Return True if there is an output within HEADERS_WITHIN seconds."""
    with anyio.move_on_after(HEADERS_WITHIN):
        await outputs.wait()
        return True
    return False


def _deadlines(server: ModelServer, request: RequestScope, body: GenerationRequest) -> Deadlines:
    """Return the times by which the request must have ended and its first token must have come; None for no limit.

    Of the body's `timeout` and the header `X-Request-Timeout` the shorter one counts. Raises ApiError 400.
    """
    settings, header = server.settings, _header_timeout(request)
    asked = [seconds for seconds in (body.timeout, header) if seconds is not None]
    usual = (None, None) if request.is_batch else (settings.default_timeout, settings.default_ttft_timeout)
    timeout = min(asked, default=usual[0])
    ttft_timeout = usual[1] if body.ttft_timeout is None else body.ttft_timeout
    start, longest = request.arrival_time, settings.max_timeout
    end, first_token = (None if each is None else start + min(each, longest) for each in (timeout, ttft_timeout))
    return end, first_token


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
