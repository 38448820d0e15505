"""Timelines are few, and each tenant that asks has its part of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.http.scope import RequestScope
from app.observability import tracing as timelines_module
from app.observability.tracing import LEAST_BYTES, Timelines


@pytest.fixture(autouse=True)
def only_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines_module, "timeline", lambda request, status, end: {"id": request.request_id})


def keep(timelines: Timelines, tenant: str, request_id: str) -> None:
    request: Any = SimpleNamespace(tenant=SimpleNamespace(name=tenant), request_id=request_id)
    timelines.keep(cast(RequestScope, request), 200, 0.0)


def kept(timelines: Timelines) -> Counter[str]:
    return Counter({tenant: len(own) for tenant, own in timelines._kept._entries.items()})


def test_a_tenant_that_asks_a_lot_pushes_out_its_own() -> None:
    timelines = Timelines(10)
    for number in range(3):
        keep(timelines, "guest", f"guest-{number}")
    for number in range(100):
        keep(timelines, "flood", f"flood-{number}")
    assert kept(timelines) == {"guest": 3, "flood": 7}
    assert timelines.find("guest-0", "guest") == b'{"id":"guest-0"}'
    assert timelines.find("guest-0", "flood") is None
    assert timelines.find("flood-92", "flood") is None
    for number in range(100):
        keep(timelines, "guest", f"more-{number}")
    assert kept(timelines) == {"guest": 5, "flood": 5}


def test_of_more_tenants_than_timelines_the_latest_are_kept() -> None:
    timelines = Timelines(3)
    for number in range(10):
        keep(timelines, f"tenant-{number}", "same")
        keep(timelines, f"tenant-{number}", "same")
    assert kept(timelines) == {"tenant-7": 1, "tenant-8": 1, "tenant-9": 1}


def test_timelines_are_bounded_in_bytes_and_long_ones_push_out_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines = Timelines(100)
    keep(timelines, "guest", "short")
    long = {"events": ["x" * 1000] * 100}
    monkeypatch.setattr(timelines_module, "timeline", lambda request, status, end: long)
    for number in range(50):
        keep(timelines, "flood", f"long-{number}")
        keep(timelines, "flood", f"long-{number}")  # a request id that comes again
    assert kept(timelines) == {"guest": 1, "flood": LEAST_BYTES // 100_000}
    assert timelines.find("long-49", "flood") is not None
