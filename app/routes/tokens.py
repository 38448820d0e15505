"""/tokenize, /detokenize, the same under /v1, and /tokenizer_info. They need the tokenizer and no engine."""

from __future__ import annotations

import orjson
from anyio import to_thread

from app.generation import tell_left_out
from app.scope import RequestScope
from app.server import Server
from protocol.body import parse_body
from protocol.tokens import DetokenizeRequest, TokenizeChatRequest, parse_tokenize


async def tokenize(server: Server, request: RequestScope) -> None:
    """POST /tokenize: the ids of a text, or of a conversation as the chat template writes it."""
    body = await server.workload.read(request, lambda: parse_tokenize(request.body))
    tell_left_out(server, request, body.left_out, body)
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
        answer = {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids, "token_strs": strings}
        return orjson.dumps(answer)

    await request.send_json(200, await server.workload.write(len(token_ids), write))


async def tokenizer_info(server: Server, request: RequestScope) -> None:
    """GET /tokenizer_info, where the operator wants it."""
    info = server.model.tokenizer_info
    await request.send_json(200, await to_thread.run_sync(orjson.dumps, info))  # it may list very many tokens


async def detokenize(server: Server, request: RequestScope) -> None:
    """POST /detokenize."""
    body = await server.workload.read(request, lambda: parse_body(DetokenizeRequest, request.body))
    server.check_model_name(body.model)
    model = server.model

    def write() -> bytes:
        body.check(model.engine_info.vocab_size)
        return orjson.dumps({"prompt": model.prompts.decode(body.tokens)})

    await request.send_json(200, await server.workload.write(len(body.tokens), write))
