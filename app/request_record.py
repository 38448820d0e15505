"""What is known of a request when it has ended. Log line and trace are made from it: it has no room for text."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from app.scope import RequestScope


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times are `time.monotonic()`; what is None was not reached, or the request generates nothing.

    `route` is the path's template. `error` is a type or code, not a message that may quote the prompt, and `param` the
    path of the field at fault, up to the first name that a client may have made up.
    """

    request_id: str
    method: str
    path: str
    route: str
    model: str
    status: int  # what the client was sent, or 499 if it left before the first byte
    arrival_time: float
    ended_time: float
    error: str | None = None
    param: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


_PATH = re.compile(r"[a-z_]{1,40}(\.([a-z_]{1,40}|[0-9]{1,6})(?![^.]))*")

_OF_OUTPUTS = (
    *("first_scheduled_time", "first_token_time", "finish_reason"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
)


def _known(param: str | None) -> str | None:
    head = None if param is None or param.startswith("metadata.") else _PATH.match(param)
    return param and (head[0] if head else param.partition(".")[0])


def record_of(request: RequestScope, *, route: str, model: str, status: int) -> RequestRecord:
    """The record of a request that has ended just now."""
    of_outputs = {} if request.outputs is None else {n: getattr(request.outputs, n) for n in _OF_OUTPUTS}
    return RequestRecord(
        request_id=request.request_id,
        method=request.method,
        path=request.path,
        route=route,
        model=model,
        status=status,
        arrival_time=request.arrival_time,
        ended_time=time.monotonic(),
        error=request.error_code,
        param=_known(request.error_param),
        **of_outputs,
    )
