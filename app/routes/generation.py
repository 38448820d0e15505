"""Generation, embeddings and tokens: handlers made from the dialects' records.

A dialect with answers that depend on more than their request has its own handlers in `app.routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from anyio import to_thread

from app.http.scope import RequestScope
from app.serving.generation import GenerationTask, count_tokens, generate, new_head, parse, warn_of_left_out
from app.serving.model_server import ModelHandler, ModelServer
from engine.messages import Pooling
from protocol.answers import AnswerContext, BodyWriter, Detokenized, InputTokens, StreamWriter, Tokens, encode
from protocol.body import parse_body
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.embeddings import EmbeddingBodyWriter, EmbeddingRequest
from protocol.openai.generation import GenerationRequest
from protocol.operations import GenerationRoute
from protocol.registry import DIALECTS, DetokenizeRequest, TokenizeChatRequest, parse_tokenize
from protocol.request_fields import RequestFields

if TYPE_CHECKING:
    from app.serving.prompts import Prompts

R = TypeVar("R", bound=RequestFields)


def dialect_handlers() -> Iterator[tuple[str, ModelHandler]]:
    """Yield the paths of the dialects with their POST handlers."""
    for dialect in DIALECTS:
        for generation in dialect.generation:
            yield generation.path, partial(_answer, generation)
        for path, model in dialect.counting.items():
            yield path, partial(_count, model)


async def _answer(route: GenerationRoute[Any], server: ModelServer, request: RequestScope) -> None:
    given = await parse(server, route.request, request)
    await answer(given, server, request, route.id_prefix, route.stream_writer, route.body_writer)


async def answer(
    given: R,
    server: ModelServer,
    request: RequestScope,
    id_prefix: str,
    stream_writer: Callable[[R, AnswerContext], StreamWriter],
    body_writer: Callable[[R, AnswerContext], BodyWriter],
    *,
    cuts_to_fit: bool = False,
) -> None:
    """Answer a request of any dialect by one of the writers."""
    body = await _translated(server, request, given)
    body.check_template_kwargs(server.settings.template_kwargs)
    task = GenerationTask(
        head=new_head(server, request, id_prefix, given.model, body.request_id),
        body=body,
        prompts=await server.workload.read(request, partial(body.prompts, server.model.engine_info.vocab_size)),
        cuts_to_fit=cuts_to_fit,
        stream_writer=partial(stream_writer, given),
        body_writer=partial(body_writer, given),
    )
    await generate(server, request, task)


async def _count(model: type[RequestFields], server: ModelServer, request: RequestScope) -> None:
    given = await parse(server, model, request)
    body = await _translated(server, request, given)
    server.check_model_name(given.model)
    assert isinstance(body, ChatCompletionRequest)
    await request.send_json(200, encode(InputTokens(await count_tokens(server, body))))


async def _translated(server: ModelServer, request: RequestScope, given: RequestFields) -> GenerationRequest:
    """Return the request in the server's own form, and set the header that names fields without effect."""
    defaults = server.model.default_sampling

    def read() -> GenerationRequest:
        given.fill_in(defaults)
        body = cast(GenerationRequest, given.translate())  # `RequestFields` cannot import the class that it promises
        body.fill_in(defaults)
        return body

    body = await server.workload.read(request, read)
    await warn_of_left_out(server, request, given, body)
    return body


# --------------------------------------------------------------------------------------------------------------- tokens
# Tokenization and /tokenizer_info, which need the tokenizer and no engine.


async def tokenize(server: ModelServer, request: RequestScope) -> None:
    """POST /tokenize: the token ids of a text, or of a conversation in the chat template's form."""
    body = await server.workload.read(request, lambda: parse_tokenize(request.body))
    await warn_of_left_out(server, request, body, body)
    server.check_model_name(body.model)
    model = server.model
    longest = model.engine_info.max_model_len
    if isinstance(body, TokenizeChatRequest):
        body.check_template_kwargs(server.settings.template_kwargs)
        token_ids = await model.prompts.encode_chat(body, longest)
    else:
        special = body.add_special_tokens
        (token_ids,) = await model.prompts.encode_texts([body.prompt], longest, add_special_tokens=special)
    token_ids = body.truncated(token_ids, longest)

    def write() -> bytes:
        strings = model.prompts.token_strings(token_ids) if body.return_token_strs else None
        return encode(Tokens(len(token_ids), longest, token_ids, strings))

    await request.send_json(200, await server.workload.write(len(token_ids), write))


async def tokenizer_info(server: ModelServer, request: RequestScope) -> None:
    """GET /tokenizer_info, if the setting `enable_tokenizer_info_endpoint` is on."""
    info = server.model.tokenizer_info
    await request.send_json(200, await to_thread.run_sync(orjson.dumps, info))  # it may list very many tokens


async def detokenize(server: ModelServer, request: RequestScope) -> None:
    """POST /detokenize: the text of token ids."""
    body = await server.workload.read(request, lambda: parse_body(DetokenizeRequest, request.body))
    server.check_model_name(body.model)
    model = server.model

    def write() -> bytes:
        body.check(model.engine_info.vocab_size)
        return encode(Detokenized(model.prompts.decode(body.tokens)))

    await request.send_json(200, await server.workload.write(len(body.tokens), write))


# ----------------------------------------------------------------------------------------------------------- embeddings


async def embeddings(server: ModelServer, request: RequestScope) -> None:
    """Answer an embeddings request: embed every input, each as a request to the engine that generates nothing."""
    body = await parse(server, EmbeddingRequest, request)
    await warn_of_left_out(server, request, body)
    await embed(server, request, body, partial(EmbeddingBodyWriter, body))


async def embed(
    server: ModelServer,
    request: RequestScope,
    body: EmbeddingRequest,
    body_writer: Callable[[AnswerContext], BodyWriter],
) -> None:
    """Embed every input, and answer with the writer's body."""
    model = server.model
    embedder, is_encoder = model.files.embedder, model.engine_info.facts.is_encoder
    size = model.files.config.embedding_size
    pooling = body.kind(server.settings.embedding_pooling or embedder.pooling or "mean", is_encoder=is_encoder)
    conversation = await server.workload.read(request, body.conversation)
    prompts: Prompts
    if conversation is None:
        prompts = await server.workload.read(
            request, lambda: body.inputs(model.engine_info.vocab_size, embedder.prompts, embedder.default_prompt)
        )
    else:
        prompts = [conversation]
        conversation.check_template_kwargs(server.settings.template_kwargs)
        await warn_of_left_out(server, request, conversation, fields=body.without_effect)
    body.check_dimensions(size)
    prefill = await server.workload.read(request, partial(body.to_prefill, is_encoder=is_encoder))
    prefill.vector_size = size if pooling is Pooling.TOKENS else 0
    head = new_head(server, request, "embd-", body.model, body.request_id)
    prompt = "" if embedder.pools_prompt else body.prompt(embedder.prompts, embedder.default_prompt)
    task = GenerationTask(
        head=head,
        body=prefill,
        pooling=pooling,
        num_unpooled=await model.prompts.count_prompt(prompt, prefill) if isinstance(prompts[0], str) else 0,
        prompts=prompts,
        body_writer=body_writer,
    )
    await generate(server, request, task)
