"""What a terminal shows of slow work: fetching and loading a model, generating for a list of prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.frontend.shared_engine import OnStep
    from gpu.checkpoint import Progress


@contextmanager
def loading() -> Iterator[Progress]:
    """Shows slow steps as bars in a terminal, and as one line per step elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
                if not console.is_terminal:
                    print(phase, file=sys.stderr)
            bars.update(tasks[phase], completed=done, total=total)

        yield report


@contextmanager
def generating(num_prompts: int) -> Iterator[OnStep]:
    """A bar of finished prompts, with the speed; the block's value is told after each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        started = time.monotonic()

        def report(num_finished: int, num_tokens: int) -> None:
            speed = num_tokens / (time.monotonic() - started)
            bars.update(task, completed=num_finished, description=f"{speed:.0f} tok/s")

        yield report
