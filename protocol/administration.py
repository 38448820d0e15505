"""What administrators send."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.body import ClientModel, at_most, fail_fast

MAX_ABORTED = 1024  # ids of one call


class AbortRequest(ClientModel):
    """The body of POST /abort_requests: ids from the header x-request-id of answers, or from their bodies."""

    request_ids: Annotated[list[str], fail_fast, at_most(MAX_ABORTED, "ids")] = Field(min_length=1)


class ConfigureLogging(ClientModel):
    """The body of POST /configure_logging, whose name is SGLang's: the least severity that is logged."""

    log_level: Literal["debug", "info", "warning", "error"]
