"""What runs in a rank's process of a server: `gpu.parallel.rank_main`, whose log is the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.observability.logs import bind, configure_logging
from gpu.parallel.messages import RankSetup
from gpu.parallel.rank_main import main


@dataclass(frozen=True)
class RankLog:
    """`RankSetup.log`."""

    log_level: str
    log_format: str
    fields: dict[str, Any]  # that the lines of its engine have


def configure(setup: RankSetup) -> None:
    """Have what is logged come out like everything else that the server says."""
    log = RankLog(**setup.log)
    configure_logging(log)
    bind(**log.fields, rank=setup.layout.rank)


if __name__ == "__main__":
    main(configure)
