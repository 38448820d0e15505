"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's wire format."""

from __future__ import annotations

import time
from typing import TypeVar

import orjson

from app.generation import GenerationTask, generate, message_format
from app.scope import Handler, RequestScope
from app.server import ServedModel, Server
from engine.frontend.output_processor import RequestStream
from protocol.anthropic.messages import CountTokensRequest, MessagesChat, MessagesRequest
from protocol.anthropic.output import MessageEvents, MessageWriter
from protocol.body import parse_body
from protocol.message_parts import MessageParser
from protocol.openai.output import Head

# Who counts tokens asks whether a conversation is too long, so one that is gets a number.
COUNTED_CONTEXTS = 4


C = TypeVar("C", bound=CountTokensRequest)


def messages(server: Server) -> Handler:
    """The handler of POST /v1/messages."""

    async def handler(request: RequestScope) -> None:
        body, chat = await server.workload.read(request, lambda: _translate(MessagesRequest, request.body))
        head = Head(f"msg_{request.request_id}", int(time.time()), server.check_model_name(body.model))
        model = server.model
        token_bytes = model.llm.vocabulary.token_bytes

        def parser(outputs: RequestStream) -> MessageParser:
            return message_format(model, chat, outputs).parser(token_bytes)

        async def tokenize(model: ServedModel) -> list[list[int]]:
            return [await model.prompts.encode_chat(chat, model.engine_info.max_model_len)]

        shown = body.shows_thinking
        work = GenerationTask(
            request_id=head.id,
            body=chat,
            num_characters=len(request.body),
            tokenize=tokenize,
            event_writer=lambda outputs: MessageEvents(
                head, parser(outputs), request_id=request.request_id, show_thinking=shown
            ),
            body_writer=lambda outputs: MessageWriter(head, parser(outputs), show_thinking=shown),
        )
        await generate(server, request, work)

    return handler


def count_tokens(server: Server) -> Handler:
    """The handler of POST /v1/messages/count_tokens."""

    async def handler(request: RequestScope) -> None:
        body, chat = await server.workload.read(request, lambda: _translate(CountTokensRequest, request.body))
        server.check_model_name(body.model)
        model = server.model
        prompt = await model.prompts.encode_chat(chat, COUNTED_CONTEXTS * model.engine_info.max_model_len)
        await request.send_json(200, orjson.dumps({"input_tokens": len(prompt)}))

    return handler


def _translate(model: type[C], content: bytes) -> tuple[C, MessagesChat]:
    body = parse_body(model, content)
    return body, body.to_chat()
