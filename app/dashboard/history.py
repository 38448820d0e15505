"""The dashboard's history: figures of the last 15 minutes and of the last 24 hours, in bounded memory.

1. A point has the figures of one interval: differences of the counters and histograms of /metrics between its ends, and
   the means of levels that were read every few seconds. Nothing is counted a second time.
2. A model has at most 468 points of some 200 bytes. Of more than MAX_MODELS models the longest idle one is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from itertools import accumulate
from operator import add, sub
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from app.observability.metrics import ITL_BUCKETS, TTFT_BUCKETS, Totals
from app.serving.model_pool import ModelPool
from app.serving.model_server import ModelServer
from protocol.errors import ApiError

VERSION: Final = metadata.version("headrace")
EVERY: Final = 5.0  # seconds between two looks
SPANS: Final = {"15m": (EVERY, 180), "24h": (300.0, 288)}  # seconds of a point, most points
MAX_MODELS: Final = 16


FIGURES: Final = ("generated", "computed", "running", "waiting", "kv_usage", "ttft_p50", "ttft_p99", "gap_p99")
"""Generated tokens and computed prompt tokens per second, requests, the share of KV blocks that requests own, and
seconds, of which there are none without a first token or a gap between tokens."""


class Point(NamedTuple):
    """The figures of one interval."""

    time: float  # of its end, monotonic
    figures: tuple[float | None, ...]  # as `FIGURES` has them
    refused: dict[str, int]  # requests by reason


def bucket_quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the quantile of values in buckets with these upper bounds, linear within a bucket as Prometheus has it.
    The last count is of values above all bounds, which count as the highest bound. None without values."""
    total = sum(counts)
    if not total:
        return None
    ends = list(accumulate(counts))
    index = next(index for index, end in enumerate(ends) if end >= share * total and counts[index])
    if index == len(bounds):
        return bounds[-1]
    below, lower = ends[index] - counts[index], bounds[index - 1] if index else 0.0
    return lower + (bounds[index] - lower) * (share * total - below) / counts[index]


class Series:
    """The points of one model in one span."""

    def __init__(self, seconds: float, most: int, totals: Totals, now: float) -> None:
        """Start with an interval that began `now`, with these figures."""
        self._seconds = seconds
        self._points: deque[Point] = deque(maxlen=most)
        self._begin(totals, now)

    def _begin(self, totals: Totals, now: float) -> None:
        self._first, self._since = totals, now
        self._point: Point | None = None  # of the interval that still runs
        self._levels: Sequence[float] = (0.0, 0.0, 0.0)  # sums over the looks
        self._num_looks = 0

    def look(self, totals: Totals, now: float) -> None:
        """Take the figures of this moment, and end the interval if it is over."""
        first, seconds = self._first, now - self._since
        self._levels = list(map(add, self._levels, totals.levels))
        self._num_looks += 1
        ttft, gaps = list(map(sub, totals.ttft, first.ttft)), list(map(sub, totals.gaps, first.gaps))
        figures = (
            (totals.generated - first.generated) / seconds,
            (totals.computed - first.computed) / seconds,
            *(level / self._num_looks for level in self._levels),
            *(bucket_quantile(TTFT_BUCKETS, ttft, share) for share in (0.5, 0.99)),
            bucket_quantile(ITL_BUCKETS, gaps, 0.99),
        )
        refused = {reason: count - first.refused.get(reason, 0) for reason, count in totals.refused.items()}
        rounded = tuple(None if figure is None else round(figure, 4) for figure in figures)
        self._point = Point(now, rounded, {reason: count for reason, count in refused.items() if count})
        if seconds >= self._seconds - EVERY / 2:
            self._points.append(self._point)
            self._begin(totals, now)

    @property
    def points(self) -> list[Point]:
        """All points, oldest first. The last one may be of an interval that still runs."""
        return [*self._points] if self._point is None else [*self._points, self._point]


class History:
    """The figures of each model over time. Owned by the event loop."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._models: dict[str, dict[str, Series]] = {}
        self._totals: dict[str, Totals] = {}  # in the order of change, the longest unchanged first

    async def run(self) -> None:
        """Look at the figures every few seconds, until cancelled."""
        while True:
            self.look(time.monotonic())
            await anyio.sleep(EVERY)

    def look(self, now: float) -> None:
        for metrics in self._pool.server.metrics.by_model:
            totals, name = metrics.totals(), metrics.name
            if totals != self._totals.get(name):
                before = self._totals.pop(name, Totals())
                self._totals[name] = totals
                if name not in self._models:
                    self._models[name] = {span: Series(*each, before, now - EVERY) for span, each in SPANS.items()}
            for series in self._models.get(name, {}).values():
                series.look(totals, now)
        for name in list(self._totals)[:-MAX_MODELS]:
            self._models.pop(name, None)

    def answer(self, span: str) -> bytes:
        """Return JSON: what is served, and by model the columns of the points of a span, with the age of each in
        seconds. Raises ApiError 400 for an unknown span."""
        if span not in SPANS:
            raise ApiError(400, f"span: got {span[:32]!r}; allowed: {', '.join(SPANS)}", param="span")
        now, server = time.monotonic(), self._pool.server
        columns: dict[str, dict[str, Sequence[Any]]] = {}
        for name in [each for each in reversed(list(self._totals)) if each in self._models]:
            points = self._models[name][span].points
            columns[name] = dict(zip(FIGURES, zip(*(each.figures for each in points), strict=True), strict=False))
            columns[name] |= {
                "age": [round(now - each.time, 1) for each in points],
                "refused": [each.refused for each in points],
            }
        return msgspec.json.encode(
            {
                "object": "history",
                "version": VERSION,
                "phase": server.phase,
                "seconds": now - server.started,
                "administered": server.tenants.administered,
                "point_seconds": SPANS[span][0],
                "models": [_describe(each) for each in self._pool.models if each.llm is not None],
                "series": columns,
            }
        )


def _describe(model: ModelServer) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": model.name}
    with suppress(ApiError):  # it is being loaded
        info = model.model.engine_info
        facts |= {
            "root": model.model.files.name,
            "device": info.facts.compute_form,
            "threads": model.model.num_threads,
            "context": info.max_model_len,
            "slots": model.settings.max_num_seqs * model.model.llm.num_engines,
            "engines": model.model.llm.num_engines,
            "kv_tokens": model.model.llm.num_blocks * info.block_size,
        }
    return facts
