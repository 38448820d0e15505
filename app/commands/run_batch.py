"""`headrace run-batch`: answer a file of requests without a server, as `vllm run-batch` does.

Rows go through the handlers of the routes. What is written stays: the same command goes on where the last one ended.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import anyio
from anyio import CapacityLimiter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.admission.tenants import ANONYMOUS
from app.application import create_app
from app.config.settings import Settings, SettingsError
from app.http.scope import MAX_BYTES_IN_ALL
from app.serving.batches import Answer, BatchRows, answer_row, answer_rows
from app.serving.model_pool import ModelPool
from protocol.openai.batches import ENDPOINTS, Row

LOADING_POLL_SECONDS = 0.1


def add_flags(parser: ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="JSONL of requests.")
    files.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="JSONL of answers. Rows in it are done."
    )


def run(settings: Settings, *, input_file: Path, output_file: Path) -> int:
    """Answer every row of the file. Return 1 if the file is wrong or a row failed."""
    rows = BatchRows(input_file, output_file, output_file, settings.max_body_bytes or MAX_BYTES_IN_ALL)
    try:
        errors = rows.check(None)
        for error in errors:
            where = "" if error.line is None else f"line {error.line}: "
            print(f"{input_file}: {where}{error.message}", file=sys.stderr)
        if errors:
            return 1
        rows.open()
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}") from None
    except ValueError:
        words = "has lines that are not of a batch. What works: another file, or one that does not exist"
        raise SettingsError(f"--output-file: {output_file} {words}") from None
    started, before = time.monotonic(), rows.num_written
    own = {"files_dir": None, "log_requests": False, "log_level": "error"}
    try:
        if before < rows.counts.total:
            anyio.run(_answer, settings.model_copy(update=own), rows, backend_options={"use_uvloop": True})
    finally:
        rows.close()
        seconds, written = time.monotonic() - started, rows.num_written
        print(
            f"{written} of {rows.counts.total} rows are in {output_file}, {rows.counts.failed} of them errors; "
            f"{written - before} took {seconds:.1f} s",
            file=sys.stderr,
        )
    return 1 if rows.counts.failed else 0


async def _answer(settings: Settings, rows: BatchRows) -> None:
    application = create_app(settings)
    pool: ModelPool = application.state.pool
    server = pool.server
    routes: list[Any] = application.routes  # each with a path
    endpoints = {each.path: each.endpoint for each in routes if each.path in ENDPOINTS}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("Starting", total=rows.counts.total)

        async def show() -> None:
            while True:
                words = "rows" if server.loaded.is_set() or pool.only is None else pool.only.start_up.task
                progress.update(bar, description=words, completed=rows.num_written)
                await anyio.sleep(LOADING_POLL_SECONDS)

        async def answer(row: Row) -> Answer:
            return await answer_row(endpoints[row.url], ANONYMOUS, row)

        async with anyio.create_task_group() as task_group:
            server.task_group = task_group
            task_group.start_soon(show)
            task_group.start_soon(pool.run)
            await server.loaded.wait()
            await answer_rows(rows, answer, CapacityLimiter(settings.max_num_seqs))
            task_group.cancel_scope.cancel()
