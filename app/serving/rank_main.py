"""The main module of a rank's process: `gpu.parallel.rank_main` with the server's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.observability.logs import bind, configure_logging
from gpu.parallel.messages import RankSetup
from gpu.parallel.rank_main import main


@dataclass(frozen=True)
class RankLog:
    """The contents of `RankSetup.log`."""

    log_level: str
    log_format: str
    fields: dict[str, Any]  # of every log line of its engine


def configure(setup: RankSetup) -> None:
    """Configure this rank's logging like the server's."""
    log = RankLog(**setup.log)
    configure_logging(log)
    bind(**log.fields, rank=setup.layout.rank)


if __name__ == "__main__":
    main(configure)
