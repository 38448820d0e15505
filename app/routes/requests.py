"""GET /v1/requests/{id}/timeline: what happened to one of the last requests."""

from __future__ import annotations

from app.scope import RequestScope
from app.server import Server
from protocol.errors import ApiError


async def timeline(server: Server, request: RequestScope) -> None:
    """GET /v1/requests/{id}/timeline. The id is the one in the x-request-id header of the answer."""
    found = server.timelines.find(request.path_params["id"], request.tenant.name)
    if found is None:
        raise ApiError(
            404,
            f"There is no timeline of this request: it is unknown, still runs, or is not among the last "
            f"{server.settings.timeline_size}. The id is that of the header x-request-id in its answer.",
            param="id",
            code="request_not_found",
        )
    await request.send_json(200, found)
