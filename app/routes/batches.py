"""/v1/files and /v1/batches, of a server with the setting `files_dir`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import orjson
from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.http.scope import FILE_PIECE, RequestScope
from app.serving.batches import BatchRunner
from app.serving.files import FileStore, Upload
from app.serving.server import Server, ServerHandler
from protocol.answers import encode
from protocol.body import page_body, page_order, page_size, parse_body, validate
from protocol.errors import ApiError
from protocol.openai.batches import BatchRequest, Deleted, FileObject, UploadForm

MAX_FIELDS, MAX_FIELD = 16, 4096  # of a form; bytes of one
MAX_FILENAME = 255


class Form:
    """A multipart form. Its fields are kept, its file is written to `upload` as it arrives. Functions block."""

    def __init__(self, content_type: str, upload: Upload) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
            raise _wrong_form("Content-Type must be multipart/form-data with a boundary")
        self.fields: dict[str, Any] = {}
        self._upload = upload
        self._name, self._is_file, self._is_complete = "", False, False
        self._value, self._header, self._disposition = bytearray(), bytearray(), bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_begin": self._header.clear,
                    "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                    "on_header_value": self._read_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._read,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _wrong_form(str(error)) from None

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body. Raises ApiError 400, and what `Upload.write` raises."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise _wrong_form("the body does not fit its boundary") from None

    def finish(self) -> UploadForm:
        """Return the fields of a form that has arrived. Raises ApiError 400."""
        if not self._is_complete:
            raise _wrong_form("the body ends before its last boundary")
        parts = {
            name[len("expires_after[") : -1]: int(value) if value.isdecimal() else value
            for name, value in self.fields.items()
            if re.fullmatch(r"expires_after\[\w+\]", name)
        }
        return validate(UploadForm, self.fields | ({"expires_after": parts} if parts else {}))

    def _begin_part(self) -> None:
        self._disposition.clear()
        self._value.clear()

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _end_headers(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if len(self.fields) >= MAX_FIELDS or (self._is_file and "file" in self.fields):
            raise _wrong_form(f"it takes one file and at most {MAX_FIELDS} fields")
        if self._is_file:
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            # Only the last part of a path; it is shown, and never used as one.
            self.fields["file"] = re.split(r"[/\\]", name)[-1][:MAX_FILENAME] or "upload"

    def _read(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._upload.write(data[start:end])
        elif len(self._value) + end - start > MAX_FIELD:
            raise _wrong_form(f"a field other than file may have {MAX_FIELD} bytes")
        else:
            self._value += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


def _wrong_form(words: str) -> ApiError:
    return ApiError(400, f"The form cannot be read: {words}. Send multipart/form-data with file and purpose.")


async def upload_file(store: FileStore, server: Server, request: RequestScope) -> None:
    """POST /v1/files: write the form's file to the disk as it arrives."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > server.settings.max_file_bytes + MAX_FIELDS * 2 * MAX_FIELD:
        await to_thread.run_sync(store.check_room, request.tenant.name, int(announced))
    upload = await to_thread.run_sync(Upload, store, request.tenant.name)
    try:
        form = Form(request.headers.get("content-type", ""), upload)
        num_read, pieces = 0, bytearray()
        while piece := await request.next_piece(num_read):
            num_read += len(piece)
            pieces += piece
            if len(pieces) >= FILE_PIECE:
                await to_thread.run_sync(form.feed, bytes(pieces))
                pieces.clear()
        await to_thread.run_sync(form.feed, bytes(pieces))
        fields = form.finish()
        seconds = None if fields.expires_after is None else fields.expires_after.seconds
        file = await to_thread.run_sync(upload.keep, fields.file, seconds)
    finally:
        upload.close()
    await request.send_json(200, encode(file))


async def list_objects(store: FileStore, kind: str, server: Server, request: RequestScope) -> None:
    """GET /v1/files and /v1/batches: a page of the tenant's objects."""
    query = request.query_fields()
    usual, most = ("10000", 10_000) if kind == "file" else ("20", 100)
    limit, order = page_size(query.get("limit", usual), most), page_order(query)
    purpose = query.get("purpose") if kind == "file" else None

    def read() -> bytes:
        objects, has_more = store.page(
            request.tenant.name, kind, after=query.get("after"), limit=limit, order=order, purpose=purpose
        )
        return page_body(list(map(orjson.loads, objects)), has_more=has_more, object="list")

    await request.send_json(200, await to_thread.run_sync(read))


async def show_object(store: FileStore, kind: str, server: Server, request: RequestScope) -> None:
    """GET /v1/files/{id} and /v1/batches/{id}."""
    found = await to_thread.run_sync(store.find, request.tenant.name, kind, request.path_params["id"])
    await request.send_json(200, found)


async def file_content(store: FileStore, server: Server, request: RequestScope) -> None:
    """GET /v1/files/{id}/content: the file as it was uploaded or written."""
    found = await to_thread.run_sync(store.find, request.tenant.name, "file", request.path_params["id"])
    file = msgspec.json.decode(found, type=FileObject)
    try:
        await request.send_file(store.path(file.id), file.bytes)
    except FileNotFoundError:
        raise ApiError(404, f"The file {file.id} was deleted just now.", param="id", code="not_found") from None


async def delete_file(store: FileStore, server: Server, request: RequestScope) -> None:
    """DELETE /v1/files/{id}: refused while a batch reads it."""
    file_id = request.path_params["id"]
    await to_thread.run_sync(store.delete_file, request.tenant.name, file_id)
    await request.send_json(200, encode(Deleted(id=file_id)))


async def create_batch(store: FileStore, runner: BatchRunner, server: Server, request: RequestScope) -> None:
    """POST /v1/batches: have every line of a file answered. The file is checked afterwards."""
    body = await server.workload.read(request, lambda: parse_body(BatchRequest, request.body))
    batch = await to_thread.run_sync(store.add_batch, request.tenant.name, body)
    runner.changed.set()
    await request.send_json(200, batch)


async def cancel_batch(store: FileStore, runner: BatchRunner, server: Server, request: RequestScope) -> None:
    """POST /v1/batches/{id}/cancel: end a batch. What is answered stays."""
    batch = await to_thread.run_sync(store.cancel, request.tenant.name, request.path_params["id"])
    runner.changed.set()
    await request.send_json(200, batch)


def handlers(store: FileStore, runner: BatchRunner) -> Iterator[tuple[str, str, ServerHandler]]:
    """Yield method, path and handler of every route but that of uploads."""
    yield "GET", "/v1/files", partial(list_objects, store, "file")
    yield "GET", "/v1/files/{id}", partial(show_object, store, "file")
    yield "GET", "/v1/files/{id}/content", partial(file_content, store)
    yield "DELETE", "/v1/files/{id}", partial(delete_file, store)
    yield "POST", "/v1/batches", partial(create_batch, store, runner)
    yield "GET", "/v1/batches", partial(list_objects, store, "batch")
    yield "GET", "/v1/batches/{id}", partial(show_object, store, "batch")
    yield "POST", "/v1/batches/{id}/cancel", partial(cancel_batch, store, runner)
