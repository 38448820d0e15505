"""GET /v1/models and /v1/models/{id}: what is served here."""

from __future__ import annotations

from typing import Any

import orjson

from app.scope import RequestScope
from app.server import Server
from protocol.openai.models import model_card, model_list, unknown_model


async def list_models(server: Server, request: RequestScope) -> None:
    """GET /v1/models."""
    await request.send_json(200, model_list([_card(server, name) for name in server.settings.model_names]))


async def show_model(server: Server, request: RequestScope) -> None:
    """GET /v1/models/{id}; ids may contain slashes."""
    name = request.path_params["id"]
    if name not in server.settings.model_names:
        raise unknown_model(name, server.settings.model_names)
    await request.send_json(200, orjson.dumps(_card(server, name)))


def _card(server: Server, name: str) -> dict[str, Any]:
    model = server.model
    return model_card(name, root=model.root, created=server.created, max_model_len=model.engine_info.max_model_len)
