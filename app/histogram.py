"""A histogram that takes many equal values at once.

prometheus-client's own takes one value a call, at about two microseconds; the inter-token latency has one value for
every token, but the tokens of one step mostly share theirs. Used by `app.metrics`, on the event loop alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class WeightedHistogram(Collector):
    """One series with constant labels. `buckets` are upper bounds in ascending order, infinity not among them."""

    def __init__(
        self, name: str, text: str, labels: dict[str, str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value. A bucket holds what is less than or equal to its bound."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        cumulative, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            cumulative += count
            buckets.append((floatToGoString(bound), float(cumulative)))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
