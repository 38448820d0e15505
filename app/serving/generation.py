"""From a parsed body to tokens to an answer, for every wire format.

A route says what it wants in a `GenerationTask`: the knobs, how to tokenize, and who writes the answer. Everything
between is here once, so that a place in the queue, deadlines, cancellation, keep-alive and slow readers hold on every
route.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.lowlevel import checkpoint

from app.http.record import MAX_CHARACTERS, MAX_MESSAGES, Phase, Transcript
from app.http.scope import RequestScope
from app.runtime import INLINE_ANSWER, weight_of, weight_so_far
from app.serving.server import ServedModel, Server
from engine.errors import InvalidRequest, PromptTooLong
from engine.frontend.request_stream import RequestStream
from engine.messages import EngineCoreRequest, Pooling, RequestOutput
from protocol.answers import CONTENT_TYPE, KEEP_ALIVE, AnswerContext, BodyWriter, Head, StreamWriter
from protocol.body import M, parse_body
from protocol.errors import ApiError, deadline_exceeded
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.generation import GenerationRequest
from protocol.request_fields import MAX_PRIORITY
from protocol.syntax.message_syntax import PROMPT_TAIL
from protocol.tools.unsupported import LeftOut

# For admission, before anything is tokenized; the count replaces it afterwards.
CHARACTERS_PER_TOKEN = 4

# Headers of a stream go out as soon as there is something to say, or after so many seconds: a request that fails at
# once is still answered with a plain status, and one that waits in the queue is not mistaken for a dead server.
HEADERS_WITHIN = 0.1

# Seconds that the reader of a stream may write at a stretch before others have their turn.
WRITING_TURN = 0.005

# Where a client says of its prompt that it is not to be written anywhere. Inside a JSON string its quotes are escaped.
_IN_MEMORY = re.compile(rb'"prompt_cache_retention"\s*:\s*"in[-_]memory"')
COUNTED_CONTEXTS = 4  # that a conversation whose tokens are counted may fill

Tokenize = Callable[[ServedModel], Awaitable[list[list[int]]]]


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """What one HTTP request wants of the engine, and who writes its answer.

    `body` has the knobs, in whatever dialect they came. `num_characters` estimates the prompts' length until `tokenize`
    has counted it. One of the two writers is made, by `body.stream`, when the engine's stream is open.
    """

    head: Head
    body: GenerationRequest
    pooling: Pooling | None = None
    num_prompts: int = 1
    keeps_prefix: bool = False  # the conversation may go on
    num_characters: int
    tokenize: Tokenize
    stream_writer: Callable[[AnswerContext], StreamWriter] | None = None  # None: its body never asks for a stream
    body_writer: Callable[[AnswerContext], BodyWriter]


async def parse(server: Server, model: type[M], request: RequestScope) -> M:
    """The request's body, checked against `model`, on a worker thread if it is long. Raises ApiError 400, and 503 while
    there is nothing that could answer it."""
    _ = server.model
    return await server.workload.read(request, lambda: parse_body(model, request.body))


def tell_left_out(server: Server, request: RequestScope, left_out: LeftOut, body: object = None) -> None:
    """Set the warning header of a request with parts that have no effect: `left_out`, and the fields of a conversation
    that the model's chat template does not read."""
    if isinstance(body, ChatCompletionRequest):
        syntax = server.model.prompts.syntax
        unread = syntax.unread_fields(body.documents, body.chat_template_kwargs)
        left_out = left_out._replace(unread=unread, grammars=body.lark_tools)
    server.metrics.on_tools_left_out(left_out.tools)
    request.warn(left_out.warning())


def new_head(
    server: Server, request: RequestScope, id_prefix: str, model: str | None, given: str | None = None
) -> Head:
    """What the answer says of itself. A body may give the request's id where no header does.

    Raises ApiError 404 for a model that is not served.
    """
    if given is not None and "x-request-id" not in request.headers:
        request.request_id = given
    return Head(f"{id_prefix}{request.request_id}", int(time.time()), server.check_model_name(model))


def encode_conversation(body: ChatCompletionRequest) -> Tokenize:
    """A `Tokenize` for the messages of a chat request."""

    async def tokenize(model: ServedModel) -> list[list[int]]:
        longest = model.engine_info.max_model_len
        return [body.truncated(await model.prompts.encode_chat(body, longest), longest)]

    return tokenize


def encode_prompts(
    prompts: Sequence[str | list[int]], body: GenerationRequest, *, add_special_tokens: bool
) -> Tokenize:
    """A `Tokenize` for texts and token ids."""

    async def tokenize(model: ServedModel) -> list[list[int]]:
        longest = model.engine_info.max_model_len
        token_ids = await model.prompts.encode_texts(
            prompts, longest, param=body.prompt_field, add_special_tokens=add_special_tokens
        )
        return [body.truncated(each, longest) for each in token_ids]

    return tokenize


async def count_tokens(server: Server, chat: ChatCompletionRequest) -> int:
    """The length of a conversation. Who counts tokens asks whether it is too long, so one that is gets a number."""
    chat.check_template_kwargs(server.settings.template_kwargs)
    model = server.model
    longest = model.engine_info.max_model_len
    try:
        return len(await model.prompts.encode_chat(chat, COUNTED_CONTEXTS * longest))
    except PromptTooLong as error:
        raise chat.in_client_words(
            PromptTooLong(error.num_tokens, longest, param=error.param or "messages", is_exact=False)
        ) from None


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
    request.answer_id = work.head.id
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
        max_tokens=0 if work.pooling is not None else sampling.max_tokens,
    ) as ticket:
        if not math.isinf(deadline):
            request.end_at(deadline, deadline_exceeded("The request did not finish in time."))
        request.mark(Phase.TOKENIZE)
        prompts = await work.tokenize(model)
        request.mark(Phase.CHECK)
        prompt_end = b"".join(map(model.llm.vocabulary.token_bytes, prompts[0][-PROMPT_TAIL:]))
        sampling = await server.workload.read(
            request, partial(body.with_syntax, sampling, model.prompts.syntax, prompt_end)
        )
        num_prompt_tokens = sum(map(len, prompts))
        ticket.count_tokens(num_prompt_tokens)
        body.check_logprobs(
            list(map(len, prompts)),
            vocab_size=model.engine_info.vocab_size,
            max_model_len=model.engine_info.max_model_len,
        )
        # Looked for once, not for each prompt: there may be many in a long body.
        is_private = _IN_MEMORY.search(request.body) is not None
        if server.settings.trace_messages and not is_private and request.span is not None:
            request.transcript = _transcript(body, prompts, model.prompts.decode)
        core_requests = [
            EngineCoreRequest(
                request_id=work.head.id if len(prompts) == 1 else f"{work.head.id}-{number}",
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
                keeps_prefix=work.keeps_prefix,
                is_private=is_private,
            )
            for number, prompt in enumerate(prompts)
        ]
        if sampling.structured_output is not None:
            request.mark(Phase.COMPILE_GRAMMAR)
        async with model.llm.stream(*core_requests, begins_message=body.begins_message) as outputs:
            request.warn(LeftOut(keywords=outputs.unenforced).warning())
            request.attend(outputs)
            outputs.on_begin, outputs.on_end = ticket.begin, ticket.end
            message_format = body.message_format(model.prompts.syntax, prompt_end)
            answer = AnswerContext(
                head=work.head,
                request_id=request.request_id,
                prompts=outputs.prompts,
                token_bytes=model.llm.vocabulary.token_bytes,
                decode=model.prompts.decode,
                message_format=message_format,
                hidden_ids=model.llm.vocabulary.special_ids if body.skip_special_tokens else frozenset(),
                fingerprint=model.fingerprint,
            )
            send = _send_stream if body.stream else _send_whole
            await send(server, request, work, outputs, answer)


def _transcript(
    body: GenerationRequest, prompts: Sequence[list[int]], decode: Callable[[list[int]], str]
) -> Transcript:
    if isinstance(body, ChatCompletionRequest):
        return Transcript((each["role"], each.get("content") or "") for each in body.messages_for_template())
    return Transcript(("user", decode(each[:MAX_CHARACTERS])) for each in prompts[:MAX_MESSAGES])


async def _send_whole(
    server: Server, request: RequestScope, work: GenerationTask, outputs: RequestStream, answer: AnswerContext
) -> None:
    await outputs.wait_finished()
    deltas = outputs.drain()
    if outputs.error is not None:
        raise outputs.error

    def write() -> bytes:
        writer = work.body_writer(answer)
        feed: Callable[[RequestOutput], object] = writer.feed_output
        if request.transcript is not None:
            feed = request.transcript.before(feed)
        for output in deltas:
            feed(output)
        return writer.body()

    weight = weight_of(deltas) + _weight_of_prompts(work.body, outputs)
    body = await server.workload.write(weight, write)
    await request.send_json(200, body)


def _weight_of_prompts(body: GenerationRequest, outputs: RequestStream) -> int:
    """How much of an answer repeats prompts."""
    return outputs.num_prompt_tokens if body.echo or body.return_token_ids else 0


async def _send_stream(
    server: Server, request: RequestScope, work: GenerationTask, outputs: RequestStream, answer: AnswerContext
) -> None:
    assert work.stream_writer is not None
    writer = await server.workload.write(_weight_of_prompts(work.body, outputs), partial(work.stream_writer, answer))
    feed: Callable[[RequestOutput], bytes] = writer.feed_output
    if request.transcript is not None:
        feed = request.transcript.before(feed)

    async def fail(error: ApiError) -> bytes:
        unsent = outputs.drain()
        return await server.workload.write(weight_so_far(outputs), lambda: writer.fail_stream(error, unsent))

    start = partial(
        request.start_stream,
        CONTENT_TYPE,
        error_frame=fail,
        keep_alive=(server.settings.sse_keep_alive or math.inf, KEEP_ALIVE),
    )
    if not await _has_begun(outputs):
        await start()

    def forward(deltas: Collection[RequestOutput]) -> bool:
        """Send what a step has brought right away, unless it ends a choice or the client lags."""
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
        outputs.listen(None)  # nor may it write while this does
        weight = weight_of([output])
        # Raises for a failed output: before the first byte, that is a plain answer.
        frames = await server.workload.write(weight, partial(feed, output))
        outputs.listen(forward)
        if outputs.is_drained:
            break  # these frames and the end in one piece
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
    """Whether there is something to say soon."""
    with anyio.move_on_after(HEADERS_WITHIN):
        await outputs.wait()
        return True
    return False


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
