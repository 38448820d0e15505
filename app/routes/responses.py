"""/v1/responses: create, retrieve, delete, cancel, list the input, count its tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson

from app.admission.admission import Limit
from app.http.scope import RequestScope
from app.runtime import INLINE_BODY_BYTES, weight_so_far
from app.serving.endpoint import BackgroundScope, follow
from app.serving.generation import GenerationTask, count_tokens, generate, new_head, parse, warn_of_left_out
from app.serving.model_server import ModelServer
from app.serving.response_store import EventLog, RunningResponse, StoredResponse
from app.serving.server import Server
from engine.messages import FinishReason
from protocol.answers import AnswerContext
from protocol.errors import ApiError, shown
from protocol.openai.logprobs import ChatLogprobs
from protocol.responses.items import Item, ItemReference, listed, listing, stored_items
from protocol.responses.output import CANCELLED, ResponseBodyWriter
from protocol.responses.request import InputTokensRequest, ResponsesChat, ResponsesRequest

_DELETED = ApiError(404, "The response has been deleted.", param="id", code="not_found")
_CANCELLED_BY_ANOTHER = ApiError(
    409, "The response has been cancelled by another request.", code=CANCELLED, headers={"x-should-retry": "false"}
)


async def create(server: ModelServer, request: RequestScope) -> None:
    """POST /v1/responses: generate a response."""
    body = await parse(server, ResponsesRequest, request)
    stores = _stores(server, body)
    previous = _previous(server, request, body)
    defaults = server.model.default_sampling

    def read() -> tuple[ResponsesChat, bytes, dict[str, Any]]:
        items = _conversation(server, request, body, previous)
        context = orjson.dumps(listed(items)) if stores else b""
        body.fill_in(defaults)
        chat = body.translate(items)
        chat.fill_in(defaults)
        return chat, context, body.echo()

    chat, context, echo = await server.workload.read(request, read, _num_stored_bytes(body, previous))
    await warn_of_left_out(server, request, body, chat)
    chat.check_template_kwargs(server.settings.template_kwargs)
    head = new_head(server, request, "resp_", body.model)

    log = EventLog() if body.background else None

    def keep(response: dict[str, Any]) -> None:
        if stores:
            instead = b"" if log is None else orjson.dumps(_too_large(response))
            server.responses.keep(request.tenant.name, head.id, orjson.dumps(response), context, log, instead)

    write_logprobs = ChatLogprobs(server.model.llm.vocabulary.token_bytes) if body.wants_logprobs else None
    writer = ResponseBodyWriter(
        head, echo | {"store": stores}, call_forms=body.call_forms(), write_logprobs=write_logprobs, done=keep
    )

    def reading(answer: AnswerContext) -> ResponseBodyWriter:
        return writer.read_with(answer.parser())

    task = GenerationTask(
        keeps_prefix=stores,
        head=head,
        body=chat,
        prompts=[chat],
        cuts_to_fit=body.truncation == "auto",
        stream_writer=reading,
        body_writer=reading,
    )
    if log is None:
        with server.responses.running(head.id, RunningResponse(request, writer, context)):
            await generate(server, request, task)
        return
    background = BackgroundScope(server.server, request, log, writer.fail_stream)
    background.warn(request.warning)
    running = RunningResponse(background, writer, context, log)
    try:
        server.responses.begin(head.id, running, log)
    except ApiError as error:
        if error.status == 429:
            server.metrics.on_rejection(Limit.BACKGROUND)
        raise
    log.append(writer.queue())

    def end() -> None:
        server.let_go()
        server.responses.end(head.id, running)

    server.hold()
    try:
        await background.begin(server.server, "/v1/responses", lambda scope: generate(server, scope, task), end)
    except ApiError:  # it was refused before it began
        server.responses.delete(request.tenant.name, head.id)
        raise
    request.warning = background.warning
    if body.stream:
        await follow(server.server, request, log, 0)
    else:
        await request.send_json(200, await _as_far_as_it_is(server, running))


async def input_tokens(server: ModelServer, request: RequestScope) -> None:
    """POST /v1/responses/input_tokens: count the tokens of a prompt."""
    body = await parse(server, InputTokensRequest, request)
    server.check_model_name(body.model)
    previous = _previous(server, request, body)
    chat = await server.workload.read(
        request,
        lambda: body.translate(_conversation(server, request, body, previous)),
        _num_stored_bytes(body, previous),
    )
    await warn_of_left_out(server, request, body, chat)
    answer = {"object": "response.input_tokens", "input_tokens": await count_tokens(server, chat)}
    await request.send_json(200, orjson.dumps(answer))


async def retrieve(server: Server, request: RequestScope) -> None:
    """GET /v1/responses/{id}. A response that is being generated is returned as far as it is complete."""
    query = request.query_fields()
    found = server.responses.find_running(request.tenant.name, request.path_params["id"]) or _stored(server, request)
    if query.get("stream", "false").lower() != "false":
        if found.log is None:
            raise ApiError(400, "stream: true is only possible for responses with background: true.", param="stream")
        await follow(server, request, found.log, _starting_after(query) + 1)
    elif isinstance(found, StoredResponse):
        await request.send_json(200, found.body)
    else:
        await request.send_json(200, await _as_far_as_it_is(server, found))


async def delete(server: Server, request: RequestScope) -> None:
    """DELETE /v1/responses/{id}. A running background response is ended."""
    response_id = request.path_params["id"]
    running = server.responses.find_running(request.tenant.name, response_id)
    if running is not None and running.log is not None:
        server.responses.end(response_id, running)
        running.log.abandon(_DELETED)
    elif not server.responses.delete(request.tenant.name, response_id):
        raise _not_found(response_id)
    answer = {"id": response_id, "object": "response", "deleted": True}
    await request.send_json(200, orjson.dumps(answer))


async def cancel(server: Server, request: RequestScope) -> None:
    """POST /v1/responses/{id}/cancel: end a response that is being generated, also one of another connection.

    A background response that has ended is returned unchanged.
    """
    tenant, response_id = request.tenant.name, request.path_params["id"]
    running = server.responses.find_running(tenant, response_id)
    if running is not None:
        is_ended = running.request.end(_CANCELLED_BY_ANOTHER, FinishReason.ABORT)
        if running.log is not None:
            await running.log.wait(math.inf)
        elif is_ended:
            body = await _as_far_as_it_is(server, running, "cancelled")
            if running.context and server.responses.find(tenant, response_id) is None:  # a stream keeps its own
                server.responses.keep(tenant, response_id, body, running.context)
            await request.send_json(200, body)
            return
    stored = _stored(server, request)
    if stored.log is None:
        raise ApiError(400, "The response has ended, so it cannot be cancelled.", code="response_not_running")
    await request.send_json(200, stored.body)


async def input_items(server: Server, request: RequestScope) -> None:
    """GET /v1/responses/{id}/input_items: all items that the response was generated from."""
    query = request.query_fields()
    running = server.responses.find_running(request.tenant.name, request.path_params["id"])
    context = running.context if running is not None and running.log is not None else _stored(server, request).context
    if not context:
        raise ApiError(404, "The items were too large to be kept.", param="id", code="not_found")
    page = await server.workload.read(request, lambda: listing(orjson.loads(context), query), len(context))
    await request.send_json(200, page)


def _stores(server: ModelServer, body: ResponsesRequest) -> bool:
    """Return True if the response is to be kept. Raises ApiError 400 if the client asks for it and the server keeps
    none."""
    if body.store and server.responses.is_off:
        raise ApiError(400, "store: true is not possible: this server keeps no responses.", param="store")
    stores = body.store is not False and not server.responses.is_off
    if body.background and not stores:
        raise ApiError(400, "background: true needs store: true, on a server that keeps responses.", param="background")
    return stores


def _previous(server: ModelServer, request: RequestScope, body: InputTokensRequest) -> StoredResponse | None:
    """Return the response that this one continues, or None. Raises ApiError 400 if that response is not kept."""
    if body.previous_response_id is None:
        return None
    previous = server.responses.find(request.tenant.name, body.previous_response_id)
    if previous is None or not previous.context:
        is_running = server.responses.find_running(request.tenant.name, body.previous_response_id) is not None
        given = shown(body.previous_response_id)
        raise ApiError(
            400,
            f"previous_response_id: the response {given} has not ended yet; wait for its end."
            if is_running
            else f"previous_response_id: no response {given} is kept here; send the whole conversation.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous


def _num_stored_bytes(body: InputTokensRequest, previous: StoredResponse | None) -> int:
    """Return how many stored bytes must be parsed again; for references of unknown size, a large number."""
    if isinstance(body.input, list) and any(isinstance(item, ItemReference) for item in body.input):
        return INLINE_BODY_BYTES + 1
    return 0 if previous is None else previous.num_bytes


async def _as_far_as_it_is(server: Server | ModelServer, running: RunningResponse, status: str | None = None) -> bytes:
    """Return the response as far as it is complete, as JSON."""
    response = running.response() if status is None else running.writer.response(status)
    weight = weight_so_far(running.request.outputs)
    return await server.workload.write(weight, lambda: orjson.dumps(response))


def _too_large(response: dict[str, Any]) -> dict[str, Any]:
    """Return the object that is kept instead of a background response that is too large."""
    message = "The response is too large to be kept. Ask for a shorter one, or raise the setting response_store_bytes."
    return response | {"status": "failed", "output": [], "error": {"code": "server_error", "message": message}}


def _starting_after(query: Mapping[str, str]) -> int:
    """Return the number of the event after which a stream begins; -1 for the whole stream. Raises ApiError 400."""
    given = query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", given):
        raise ApiError(
            400, f"starting_after must be the sequence number of an event, got {shown(given)}.", param="starting_after"
        )
    return int(given)


def _conversation(
    server: ModelServer, request: RequestScope, body: InputTokensRequest, previous: StoredResponse | None
) -> list[Item]:
    """Return all items that the answer follows. Raises InvalidRequest for references to items that are not kept."""

    @cache  # there may be many references to items of one response
    def items_of(response_id: str) -> dict[str, dict[str, Any]]:
        stored = server.responses.find(request.tenant.name, response_id)
        return {} if stored is None else {item["id"]: item for item in stored.output()}

    def find(reference: ItemReference) -> Item | None:
        item = items_of(reference.response_id).get(reference.id)
        return None if item is None else stored_items([item])[0]

    if previous is None:
        return body.items(find)
    return [*stored_items(previous.conversation()), *body.items(find)]


def _stored(server: Server, request: RequestScope) -> StoredResponse:
    response_id = request.path_params["id"]
    stored = server.responses.find(request.tenant.name, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"No response {response_id[:80]!r} is kept here (any more).", param="id", code="not_found")
