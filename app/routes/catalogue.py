"""GET /v1/models and /v1/models/{id}: what is served here, in the words of whoever asks."""

from __future__ import annotations

from typing import Any

import orjson

from app.scope import RequestScope
from app.server import Server
from protocol.anthropic.dialect import ANTHROPIC
from protocol.anthropic.models import model_info, model_page
from protocol.openai.models import model_card, model_list, unknown_model


async def list_models(server: Server, request: RequestScope) -> None:
    """GET /v1/models."""
    cards = [_card(server, request, name) for name in server.settings.model_names]
    body = model_page(cards, request.query()) if request.dialect is ANTHROPIC else model_list(cards)
    await request.send_json(200, body)


async def show_model(server: Server, request: RequestScope) -> None:
    """GET /v1/models/{id}; ids may contain slashes."""
    name = request.path_params["id"]
    if name not in server.settings.model_names:
        raise unknown_model(name, server.settings.model_names)
    await request.send_json(200, orjson.dumps(_card(server, request, name)))


def _card(server: Server, request: RequestScope, name: str) -> dict[str, Any]:
    model = server.model
    longest = model.engine_info.max_model_len
    if request.dialect is ANTHROPIC:
        return model_info(name, created=server.created, max_model_len=longest)
    return model_card(
        name,
        root=model.root,
        created=server.created,
        max_model_len=longest,
        default_parameters=model.default_sampling,
        chat_parameters=model.chat_parameters,
    )
