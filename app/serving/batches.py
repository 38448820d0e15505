"""Batches: every line of a file is answered as a request of its own, when no other request needs the engine.

1. A row goes through the handler of its route, in a request scope with its own log line, so its answer has the bytes of
   the route's. It takes no queue slot, and the engine runs it at the lowest precedence.
2. Each answer is appended to a file as one line. After a restart, rows with a complete line are not run again.
3. A row that the server cannot take now (429 or 503) is tried again later. A row that is in flight when the server ends
   is left for the next start.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import anyio
import orjson
from anyio import CapacityLimiter, to_thread
from starlette.types import ASGIApp, Message

from app.admission.tenants import Tenant
from app.http.scope import IN_BATCH, decode_headers
from app.serving.files import FileStore, append_to
from app.serving.server import Server, ServerPhase
from protocol.openai import batches

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # between two looks for batches that clients sent to other servers of the folder
SAVE_SECONDS = 1.0  # between two saves of a running batch's counts
SWEEP_SECONDS = 600.0
BATCHES_AT_ONCE = 4  # of a tenant
LEAST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds until a refused row is tried again

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body. Status 0 means no answer, because the server is stopping."""


class BatchRows:
    """The rows of an input file, and its output and error files, which may be the same file. The functions block; call
    one at a time."""

    def __init__(self, source: Path, output: Path, errors: Path, max_line: int) -> None:
        self.counts, self.usage = batches.RequestCounts(), batches.BatchUsage()
        self.model: str | None = None
        self.num_bytes = 0  # written
        self._max_line = max_line
        self._source = source
        self._paths = output, errors
        self._files: dict[Path, BinaryIO] = {}
        self._done: set[str] = set()
        self._rows = self._unanswered()

    def check(self, endpoint: str | None) -> list[batches.BatchError]:
        """Return what is wrong with the input file, at most `MAX_ERRORS`. Counts the rows."""
        seen: set[str] = set()
        errors: list[batches.BatchError] = []
        for number, line in self._lines():
            self.counts.total += 1
            if self.counts.total > batches.MAX_ROWS:
                return [
                    batches.BatchError("too_many_rows", f"The file has more than {batches.MAX_ROWS} lines. Split it.")
                ]
            if len(line) > self._max_line:
                words = f"The line is longer than {self._max_line} bytes (max_body_bytes). Shorten it."
                errors.append(batches.BatchError("line_too_long", words, number))
            elif (error := batches.check_row(line, number, endpoint, seen)) is not None:
                errors.append(error)
            if len(errors) == batches.MAX_ERRORS:
                break
            if not number % 64:
                time.sleep(1e-4)  # release the GIL for the event loop
        if not self.counts.total:
            return [batches.BatchError("empty_file", "The file has no lines.")]
        return errors

    def open(self) -> None:
        """Count the lines that are already written, and remove an incomplete last line. Raises ValueError for a file
        that no batch wrote."""
        for path in dict.fromkeys(self._paths):
            file = self._files[path] = append_to(path)
            end = 0
            with path.open("rb") as written:
                for line in written:
                    if line.endswith(b"\n"):
                        self._count(line)
                        end += len(line)
                    elif line[: len(batches.BEGINNING)] != batches.BEGINNING[: len(line)]:
                        raise ValueError("not a line of a batch")
            file.truncate(end)

    @property
    def num_written(self) -> int:
        return self.counts.completed + self.counts.failed

    def next(self) -> batches.Row | None:
        """Return the next row without an answer; None if there is none left."""
        return next(self._rows, None)

    def write(self, row: batches.Row, answer: Answer) -> None:
        status, headers, body = answer
        request_id = headers.get("x-request-id", "")
        response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
        self._append(self._paths[status >= 400], batches.written_row(row, response))

    def write_rest(self, code: str, message: str) -> None:
        """Append an error for every row without an answer."""
        for row in self._unanswered():
            self._append(self._paths[1], batches.written_row(row, None, {"code": code, "message": message}))

    def close(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _append(self, path: Path, line: bytes) -> None:
        self._files[path].write(line)
        self._files[path].flush()
        self._count(line)

    def _count(self, line: bytes) -> None:
        written = batches.read_written_row(line)
        self._done.add(written.custom_id)
        self.num_bytes += len(line)
        if written.body:
            self.counts.completed += 1
            self.model = self.model or written.body.get("model")
        else:
            self.counts.failed += 1
        batches.count(self.usage, written.body)

    def _unanswered(self) -> Iterator[batches.Row]:
        for _, line in self._lines():
            row = batches.read_row(line)
            if row.custom_id not in self._done:
                yield row

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each line that is not blank; a line that is too long is cut."""
        number = 0
        with self._source.open("rb") as file:
            while line := file.readline(self._max_line + 1):
                number += 1
                begun = line
                while len(line) > self._max_line and not line.endswith(b"\n"):
                    line = file.readline(self._max_line + 1)
                if begun.strip():
                    yield number, begun


async def answer_row(endpoint: ASGIApp, tenant: Tenant, row: batches.Row) -> Answer:
    head: dict[str, Any] = {"status": 0, "headers": []}
    pieces: list[bytes] = []
    unread: list[Message] = [{"type": "http.request", "body": bytes(row.body)}]

    async def receive() -> Message:
        if not unread:
            await anyio.sleep_forever()
        return unread.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            pieces.append(message.get("body", b""))

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": row.url, "query_string": b""}
    await endpoint({**scope, "headers": [], "headrace.tenant": tenant, IN_BATCH: True}, receive, send)
    return head["status"], decode_headers(head["headers"]), b"".join(pieces)


async def answer_rows(
    rows: BatchRows,
    answer: Callable[[batches.Row], Awaitable[Answer]],
    limiter: CapacityLimiter,
    saved: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Answer all remaining rows, several at once. Return False if an answer has the status 0; then the others stay
    unanswered. `saved` is called about once a second while rows are answered."""
    turn = anyio.Lock()
    is_ending = False
    last = time.monotonic()

    async def work() -> None:
        nonlocal is_ending, last
        while not is_ending:
            async with turn:
                row = await to_thread.run_sync(rows.next)
            if row is None:
                return
            answered = await _answer_in_the_end(row, answer, limiter)
            if not answered[0]:
                is_ending = True
                return
            with anyio.CancelScope(shield=True):
                async with turn:
                    await to_thread.run_sync(rows.write, row, answered)
            if saved is not None and time.monotonic() - last > SAVE_SECONDS:
                last = time.monotonic()
                await saved()

    async with anyio.create_task_group() as task_group:
        for _ in range(int(limiter.total_tokens)):
            task_group.start_soon(work)
    return not is_ending


async def _answer_in_the_end(
    row: batches.Row, answer: Callable[[batches.Row], Awaitable[Answer]], limiter: CapacityLimiter
) -> Answer:
    """Send a row again until the server accepts it, and return the answer."""
    wait = LEAST_WAIT
    while True:
        async with limiter:
            status, headers, body = await answer(row)
        if status not in (429, 503) or headers.get("x-should-retry") == "false":
            return status, headers, body
        asked = headers.get("retry-after", "")
        await anyio.sleep(max(wait * random.uniform(0.5, 1.0), float(asked) if asked.isdigit() else 0.0))
        wait = min(2 * wait, LONGEST_WAIT)


class BatchRunner:
    """Runs the batches of a folder, if no other server does. `endpoints` are the applications of the routes."""

    def __init__(self, server: Server, store: FileStore, endpoints: Mapping[str, ASGIApp]) -> None:
        self.changed = anyio.Event()  # set when a batch is added, cancelled or over
        self._server = server
        self._store = store
        self._endpoints = endpoints
        self._limiter = CapacityLimiter(server.settings.max_batch_rows)
        self._running: dict[str, anyio.CancelScope] = {}
        self._cancelled: set[str] = set()

    async def run(self) -> None:
        """Run the batches of all tenants until cancelled."""
        await self._server.loaded.wait()
        while not await to_thread.run_sync(self._store.becomes_owner):  # noqa: ASYNC110 - a lock has no event
            await anyio.sleep(POLL_SECONDS)
        swept = -SWEEP_SECONDS
        async with anyio.create_task_group() as task_group:
            while True:
                if time.monotonic() - swept > SWEEP_SECONDS:
                    swept = time.monotonic()
                    await to_thread.run_sync(self._store.sweep)
                self.changed = anyio.Event()
                self._start(await to_thread.run_sync(self._store.active), task_group)
                with anyio.move_on_after(POLL_SECONDS):
                    await self.changed.wait()

    def _start(self, active: list[tuple[str, batches.Batch, bool]], task_group: anyio.abc.TaskGroup) -> None:
        tenants = {tenant.name: tenant for tenant in self._server.tenants.all}
        at_once = Counter(tenant for tenant, batch, _ in active if batch.id in self._running)
        for name, batch, is_cancelled in active:
            if is_cancelled and batch.id not in self._cancelled:
                self._cancelled.add(batch.id)
                if (scope := self._running.get(batch.id)) is not None:
                    scope.cancel()
            is_over = is_cancelled or batch.expires_at <= time.time()
            if batch.id in self._running or not (name in tenants or is_over):  # the tenant's key may come back
                continue
            if at_once[name] < BATCHES_AT_ONCE or is_over:
                at_once[name] += 1
                self._running[batch.id] = anyio.CancelScope()
                task_group.start_soon(self._run, name, tenants.get(name), batch)

    async def _run(self, name: str, tenant: Tenant | None, batch: batches.Batch) -> None:
        try:
            await self._answer_batch(name, tenant, batch)
        except Exception:  # such as a full disk
            logger.exception("Batch %s failed; it is tried again", batch.id)
            await anyio.sleep(LONGEST_WAIT)
        finally:
            del self._running[batch.id]
            self._cancelled.discard(batch.id)
            self.changed.set()

    async def _answer_batch(self, name: str, tenant: Tenant | None, batch: batches.Batch) -> None:
        store, run = self._store, to_thread.run_sync
        hexadecimal = batch.id.removeprefix("batch_")
        outputs = {"output": f"file-{hexadecimal}-output", "error": f"file-{hexadecimal}-errors"}
        source, output, errors_path = map(store.path, (batch.input_file_id, *outputs.values()))
        rows = BatchRows(source, output, errors_path, self._server.bodies.max_bytes)
        try:
            errors = await run(rows.check, batch.endpoint)
        except FileNotFoundError:
            errors = [batches.BatchError("missing_file", "The input file is no longer in files_dir. Upload it again.")]
        batch.request_counts = rows.counts
        if errors:
            batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), batches.BatchErrors(errors)
            await run(store.save, batch)
            return
        await run(rows.open)
        room = await run(store.room, name)

        async def save() -> None:
            batch.model, batch.usage = rows.model, rows.usage
            await run(store.save, batch)
            if rows.num_bytes > room:
                self._running[batch.id].cancel()

        async def answer(row: batches.Row) -> Answer:
            assert tenant is not None
            answered = await answer_row(self._endpoints[batch.endpoint], tenant, row)
            is_ending = self._server.phase in (ServerPhase.STOPPING, ServerPhase.FAILED)
            return (0, {}, b"") if is_ending and answered[0] in (0, 503) else answered

        batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or int(time.time())
        await save()
        is_done = False
        with self._running[batch.id], anyio.move_on_after(max(0.0, batch.expires_at - time.time())):
            if tenant is not None and batch.id not in self._cancelled:
                is_done = await answer_rows(rows, answer, self._limiter, save)
        status: Literal["cancelled", "completed", "expired"] = "completed"
        rest: tuple[str, str] | None = None  # code and message for the rows without an answer
        if batch.id in self._cancelled:
            status = "cancelled"
        elif rows.num_bytes > room:
            rest = "storage_full", "Your files reach files_bytes_per_tenant. Delete some, and send this row again."
        elif not is_done and batch.expires_at <= time.time():
            status, rest = "expired", ("batch_expired", "The batch expired before this row ran. Send it again.")
        elif not is_done:  # the server ends
            await run(rows.close)
            return
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await save()
        if rest is not None:
            await run(rows.write_rest, *rest)
        await run(rows.close)
        for what, file_id in outputs.items():
            setattr(batch, f"{what}_file_id", await run(self._keep, name, batch, what, file_id))
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        await save()

    def _keep(self, name: str, batch: batches.Batch, what: str, file_id: str) -> str | None:
        """Add the output or the error file to the store, and return its id; None if it is empty."""
        if not self._store.path(file_id).stat().st_size:
            self._store.path(file_id).unlink()
            return None
        seconds = batch.output_expires_after
        return self._store.add_file(name, file_id, f"{batch.id}_{what}.jsonl", "batch_output", seconds).id
