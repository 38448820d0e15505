"""What is told of how several engines share the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RoutingStats(NamedTuple):
    """Levels of this moment, and counts since the start."""

    loads: Sequence[float] = ()  # seconds of work of each engine
    num_by_prefix: int = 0  # prompts that went where most of them is cached
    num_by_load: int = 0  # and those that did not
    num_placed_again: int = 0  # choices whose engine had died while they waited there
    num_deaths: int = 0  # of engines
    num_engines: int = 1  # that live
    num_guessed: int = 0  # engines that live and do not publish what they hold
    num_gaps: int = 0  # times that something of what they publish was lost
    num_bytes: int = 0  # of memory that knowing it takes
