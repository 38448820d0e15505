"""What administrators send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocol.body import ClientModel, at_most, fail_fast

MAX_ABORTED = 1024  # ids of one call


class AbortRequest(ClientModel):
    """The body of POST /abort_requests: ids from the header x-request-id of answers, or from their bodies."""

    request_ids: Annotated[list[str], fail_fast, at_most(MAX_ABORTED, "ids")] = Field(min_length=1)
