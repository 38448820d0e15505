"""How slow steps report how far they are."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callable that is told about slow steps. It is called from the thread that does the work, and must be quick."""

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        """`phase` is a short sentence for people, such as "Loading weights".

        `done` and `total` are bytes while something is fetched or verified, tensors while weights are loaded; `total`
        is None as long as it is unknown. The last call of a phase that succeeds has `done == total`.
        """
        ...


def no_progress(phase: str, done: int, total: int | None) -> None:
    """The `Progress` of callers who do not want to know."""
