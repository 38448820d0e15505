"""GET /v1/models and /v1/models/{id}: what is served, and the 404 of a name that is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from protocol.errors import ApiError

_MAX_SHOWN = 64  # characters of an unknown name that come back


def model_card(
    name: str,
    *,
    root: str,
    created: int,
    max_model_len: int,
    default_parameters: Mapping[str, float | None],
    chat_parameters: Mapping[str, float],
) -> dict[str, Any]:
    """One model. `root` is the weights' own name when `name` is an alias; `max_model_len` counts tokens.
    `default_parameters`, as OpenRouter's cards have them, are for requests that leave their sampling open;
    `chat_parameters` is what a client adds in which a person talks to the model."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "default_parameters": default_parameters,
        "chat_parameters": chat_parameters,
        "permission": [],
    }


def model_list(cards: Sequence[dict[str, Any]]) -> bytes:
    """The body of GET /v1/models."""
    return orjson.dumps({"object": "list", "data": list(cards)})


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404 for a request that names a model which is not `served`."""
    shown = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "…"
    return ApiError(
        404,
        f"The model `{shown}` does not exist. Served here: {', '.join(served)}.",
        param="model",
        code="model_not_found",
    )
