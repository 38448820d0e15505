"""Files and batches: requests, objects, and the lines of a batch's files."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
import orjson
from pydantic import Field

from protocol.answers import Answer, OpenAnswer
from protocol.body import ClientModel
from protocol.operations import Operation
from protocol.request_fields import Metadata

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
BATCH_WINDOW = 24 * 3600  # seconds
MAX_ROWS = 50_000
MAX_ERRORS = 100  # that a failed batch lists
MAX_CUSTOM_ID = 512  # characters
LEAST_AGE, LARGEST_AGE = 3600, 30 * 24 * 3600  # seconds that a client may ask for


class ExpiresAfter(ClientModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_AGE, le=LARGEST_AGE)


class UploadForm(ClientModel):
    """The fields of an upload, which is a form; the field `file` is written to disk."""

    file: str = Field(json_schema_extra={"contentMediaType": "application/octet-stream"})  # its name
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class BatchRequest(ClientModel):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(OpenAnswer, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class RequestCounts(Answer):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(Answer):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"reasoning_tokens": 0})


class BatchError(Answer):
    """An error in a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Answer):
    data: Sequence[BatchError]
    object: Literal["list"] = "list"


class Batch(OpenAnswer, kw_only=True):
    """A batch. `output_expires_after` is in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ] = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class Page(Answer, kw_only=True):
    """The shape of `protocol.body.page_body`."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Answer, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


_PAGE: dict[str, dict[str, Any]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
}
_FILES_PAGE = _PAGE | {"limit": {**_PAGE["limit"], "maximum": 10_000, "default": 10_000}, "purpose": {"type": "string"}}

BATCH_OPERATIONS = (
    Operation("post", "/v1/files", "Upload a file.", FileObject, [UploadForm], (400, 408, 413), is_form=True),
    Operation("get", "/v1/files", "The files that are kept.", Page, errors=(400, 404), query=_FILES_PAGE),
    Operation("get", "/v1/files/{id}", "One file's name, size and age.", FileObject, errors=(404,)),
    Operation("get", "/v1/files/{id}/content", "A file's content.", "application/octet-stream", errors=(404,)),
    Operation("delete", "/v1/files/{id}", "Delete a file.", Deleted, errors=(404, 409)),
    Operation("post", "/v1/batches", "Answer every line of a file.", Batch, [BatchRequest], (400, 404, 413, 429)),
    Operation("get", "/v1/batches", "The batches, the newest first.", Page, errors=(400, 404), query=_PAGE),
    Operation("get", "/v1/batches/{id}", "One batch, as far as it is.", Batch, errors=(404,)),
    Operation("post", "/v1/batches/{id}/cancel", "End a batch; answers stay.", Batch, errors=(404, 409)),
)
"""The routes of a server with the setting `files_dir`."""


# ----------------------------------------------------------------------------------------------------------------- rows
# The lines of an input file, and of the files that are written from them.


class Row(msgspec.Struct):
    """One line of an input file. `body` are the bytes of the client."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Unbatched(msgspec.Struct):
    stream: Any = None
    background: Any = None


read_row = msgspec.json.Decoder(Row).decode
_decode_unbatched = msgspec.json.Decoder(_Unbatched).decode


def check_row(line: bytes, number: int, endpoint: str | None, seen: set[str]) -> BatchError | None:
    """Return what is wrong with a line. `seen` are the `custom_id`s of the lines before it; it gets that of this one.

    Fields of the body are checked when the line is answered, except those that no batch can obey.
    """

    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code, message, number, param)

    try:
        row = read_row(line)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$.")
        if found := re.fullmatch("Object missing required field `(.*)`", words):
            return wrong("missing_required_parameter", f"{found[1]} is required.", found[1])
        param = place.rstrip("`") or None
        if param == "method":
            return wrong("invalid_method", 'method must be "POST".', param)
        return wrong("invalid_request", f"{param or 'The line'} has the wrong type: {words}.", param)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "The line is not valid JSON.")
    if not 0 < len(row.custom_id) <= MAX_CUSTOM_ID:
        return wrong("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if row.custom_id in seen:
        return wrong("duplicate_custom_id", "custom_id is that of an earlier line.", "custom_id")
    seen.add(row.custom_id)
    if row.url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        return wrong("invalid_url", f"url must be {endpoint or ' or '.join(ENDPOINTS)}.", "url")
    if bytes(row.body)[:1] != b"{":
        return wrong("invalid_request", "body must be an object.", "body")
    try:
        fields = _decode_unbatched(row.body)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "body is not valid JSON.", "body")
    for name in ("stream", "background"):
        if getattr(fields, name):
            return wrong("invalid_request", f"body.{name} must be false or left out in a batch.", f"body.{name}")
    return None


class WrittenRow(msgspec.Struct):
    """A line that was written: the `custom_id` and the answer of its row."""

    custom_id: str
    response: dict[str, Any] | None

    @property
    def body(self) -> dict[str, Any]:
        """The body of an answer; of an error, an empty object."""
        return self.response["body"] if self.response is not None and self.response["status_code"] < 400 else {}


read_written_row = msgspec.json.Decoder(WrittenRow).decode


BEGINNING = b'{"id":"batch_req_'  # of every line that is written


def written_row(row: Row, response: Mapping[str, Any] | None, error: Mapping[str, str] | None = None) -> bytes:
    """Return the line of a row's answer, or of the error that it has instead."""
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": row.custom_id, "response": response, "error": error}
    return orjson.dumps(line) + b"\n"


def count(usage: BatchUsage, answer: Mapping[str, Any]) -> None:
    """Add the tokens of an answer, in the words of chat or in those of responses, to a batch's usage."""
    tokens = answer.get("usage") or {}
    for ours, theirs, detail in (("input", "prompt", "cached_tokens"), ("output", "completion", "reasoning_tokens")):
        for name in (ours, theirs):
            number, details = tokens.get(f"{name}_tokens", 0), getattr(usage, f"{ours}_tokens_details")
            setattr(usage, f"{ours}_tokens", getattr(usage, f"{ours}_tokens") + number)
            details[detail] += (tokens.get(f"{name}_tokens_details") or {}).get(detail, 0)
            usage.total_tokens += number
