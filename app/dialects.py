"""Handlers made from the records of the dialects (`protocol.dialects`): a new one brings no line here.

A dialect whose answers depend on more than their request brings handlers of its own, in `app.routes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson

from app.generation import (
    GenerationTask,
    count_tokens,
    encode_conversation,
    encode_prompts,
    generate,
    new_head,
    tell_left_out,
)
from app.scope import RequestScope
from app.server import Server, ServerHandler
from protocol.body import parse_body
from protocol.dialect import CountingRoute, GenerationRoute
from protocol.dialects import DIALECTS
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.common import GenerationRequest
from protocol.openai.completions import CompletionRequest
from protocol.request_fields import RequestFields
from protocol.tools.left_out import LeftOut


def dialect_handlers() -> Iterator[tuple[str, ServerHandler]]:
    """Paths and the handlers of POST."""
    for dialect in DIALECTS:
        for generation in dialect.generation:
            yield generation.path, partial(_answer, generation)
        for counting in dialect.counting:
            yield counting.path, partial(_count, counting)


async def _answer(route: GenerationRoute[Any], server: Server, request: RequestScope) -> None:
    given, body = await _translated(server, request, route.request)
    body.check_template_kwargs(server.settings.template_kwargs)
    head = new_head(server, request, route.id_prefix, given.model, body.request_id)
    num_prompts = 1
    if isinstance(body, CompletionRequest):
        vocab_size = server.model.engine_info.vocab_size
        prompts = await server.workload.read(request, lambda: body.prompts(vocab_size))
        num_prompts = len(prompts)
        tokenize = encode_prompts(prompts, body, add_special_tokens=body.add_special_tokens)
    else:
        assert isinstance(body, ChatCompletionRequest)
        tokenize = encode_conversation(body)
    task = GenerationTask(
        head=head,
        body=body,
        num_prompts=num_prompts,
        num_characters=len(request.body),
        tokenize=tokenize,
        stream_writer=partial(route.stream_writer, given),
        body_writer=partial(route.body_writer, given),
    )
    await generate(server, request, task)


async def _count(route: CountingRoute, server: Server, request: RequestScope) -> None:
    given, body = await _translated(server, request, route.request)
    server.check_model_name(given.model)
    assert isinstance(body, ChatCompletionRequest)
    await request.send_json(200, orjson.dumps({"input_tokens": await count_tokens(server, body)}))


async def _translated(
    server: Server, request: RequestScope, model: type[RequestFields]
) -> tuple[RequestFields, GenerationRequest]:
    defaults = server.model.default_sampling  # before anything is read for nothing

    def read() -> tuple[RequestFields, GenerationRequest, LeftOut]:
        given = parse_body(model, request.body)
        given.fill_in(defaults)
        body = given.translate()
        body.fill_in(defaults)
        return given, body, given.left_out

    given, body, left_out = await server.workload.read(request, read)
    tell_left_out(server, request, left_out, body)
    return given, body
