"""GET /v1/models and /v1/models/{id}: what is served here."""

from __future__ import annotations

from typing import Any

import orjson

from app.scope import Handler, RequestScope
from app.server import Server
from protocol.openai.models import model_card, model_list, unknown_model


def list_models(server: Server) -> Handler:
    """The handler of GET /v1/models."""

    async def handler(request: RequestScope) -> None:
        await request.send_json(200, model_list([_card(server, name) for name in server.settings.model_names]))

    return handler


def show_model(server: Server) -> Handler:
    """The handler of GET /v1/models/{id}; ids may contain slashes."""

    async def handler(request: RequestScope) -> None:
        name = request.path_params["id"]
        if name not in server.settings.model_names:
            raise unknown_model(name, server.settings.model_names)
        await request.send_json(200, orjson.dumps(_card(server, name)))

    return handler


def _card(server: Server, name: str) -> dict[str, Any]:
    model = server.model
    return model_card(name, root=model.root, created=server.created, max_model_len=model.engine_info.max_model_len)
