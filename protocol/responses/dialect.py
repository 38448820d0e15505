"""OpenAI's Responses API. Its handlers are in `app.routes.responses`, because answers depend on those that are kept."""

from __future__ import annotations

from protocol.answers import InputTokens
from protocol.dialect import Dialect, asks, finds, generates
from protocol.responses.answers import DeletedResponse, ItemList, ResponseObject
from protocol.responses.request import InputTokensRequest, ResponsesRequest

_COUNT = "Count the tokens that a response would read."

RESPONSES = Dialect(
    root="/v1/responses",
    others=(
        generates("/v1/responses", "Answer items; the response can be continued.", ResponsesRequest, ResponseObject),
        asks("/v1/responses/input_tokens", _COUNT, InputTokens, InputTokensRequest),
        finds(
            "get",
            "/v1/responses/{id}",
            "A response that was kept, or is being made.",
            ResponseObject,
            streams=True,
            query={
                "stream": {"type": "boolean", "default": False},
                "starting_after": {"type": "integer", "minimum": -1, "description": "The number of an event."},
                "include": {"type": "array", "items": {"type": "string"}, "description": "Without effect."},
            },
        ),
        finds("delete", "/v1/responses/{id}", "Forget a response.", DeletedResponse),
        finds("post", "/v1/responses/{id}/cancel", "End a response that is being made.", ResponseObject),
        finds("get", "/v1/responses/{id}/input_items", "What a response was made from.", ItemList),
    ),
)
