"""The memory of responses stays within its bounds, and within its tenants."""

from __future__ import annotations

import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.settings import Settings
from app.serving.response_store import MAX_AGE, MAX_RESPONSES, EventLog, ResponseStore, RunningResponse
from protocol.errors import ApiError

MIB = 2**20


def store(max_count: int = MAX_RESPONSES, **settings: Any) -> ResponseStore:
    return ResponseStore(Settings(**settings), max_count=max_count)


def body(text: str) -> bytes:
    return orjson.dumps({"output": [{"type": "message", "content": text}]})


def test_a_response_is_its_tenants_alone():
    responses = store()
    responses.keep("a", "resp_1", body("mine"), b"[]")
    assert responses.find("a", "resp_1") is not None
    assert responses.find("b", "resp_1") is None
    assert not responses.delete("b", "resp_1")
    assert responses.delete("a", "resp_1")
    assert responses.find("a", "resp_1") is None


def test_a_conversation_is_what_came_before_and_what_was_answered():
    responses = store()
    responses.keep("a", "resp_1", body("Hello"), orjson.dumps([{"type": "message", "content": "Hi"}]))
    found = responses.find("a", "resp_1")
    assert found is not None
    assert [item["content"] for item in found.conversation()] == ["Hi", "Hello"]


@given(
    sizes=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 3 * MIB)), max_size=30),
    count=st.integers(1, 5),
)
def test_there_are_never_too_many_or_too_large_and_the_oldest_go_first(sizes, count):
    responses = store(count, response_store_bytes=2 * MIB)
    kept: dict[str, list[tuple[str, int]]] = {"a": [], "b": []}
    for tenant, number, size in sizes:
        response_id = f"resp_{number}"
        responses.keep(tenant, response_id, bytes(size), b"[]")
        mine = [entry for entry in kept[tenant] if entry[0] != response_id]
        if (cost := size + 2 + 512) <= 2 * MIB:  # else it is not kept, and the others are
            mine.append((response_id, cost))
        while len(mine) > count or sum(cost for _, cost in mine) > 2 * MIB:
            mine.pop(0)
        kept[tenant] = mine
        for owner, entries in kept.items():
            found = {f"resp_{n}" for n in range(10) if responses.find(owner, f"resp_{n}") is not None}
            assert found == {entry_id for entry_id, _ in entries}


def test_one_that_is_too_large_beside_what_is_being_made_costs_no_other_response():
    work = Background(response_store_bytes=2 * MIB)
    work.responses.keep("a", "small", body("small"), b"[]")
    work.begin("a", "1", MIB)
    work.responses.keep("a", "large", bytes(MIB * 3 // 2), b"[]")
    work.check()
    assert work.responses.find("a", "small") is not None
    assert work.responses.find("a", "large") is None


def test_of_one_from_the_background_that_is_too_large_the_failure_is_kept():
    work = Background(response_store_bytes=2 * MIB)
    work.responses.keep("a", "small", body("small"), b"[]")
    work.begin("a", "1", 10)
    running = work.running.pop(("a", "1"))
    work.responses.keep("a", "1", bytes(3 * MIB), b"[]", running.log, b"failed")
    work.check()
    found = work.responses.find("a", "1")
    assert found is not None
    assert (found.body, found.context) == (b"failed", b"")
    assert work.responses.find("a", "small") is not None


def test_what_is_too_old_is_dropped():
    responses = store()
    responses.keep("a", "resp_1", body("old"), b"[]")
    responses.expire(time.monotonic() + MAX_AGE - 1)
    assert responses.find("a", "resp_1") is not None
    responses.expire(time.monotonic() + MAX_AGE + 1)
    assert responses.find("a", "resp_1") is None


def test_a_store_of_no_size_keeps_nothing():
    responses = store(response_store_bytes=0)
    assert responses.is_off
    responses.keep("a", "resp_1", body("a"), b"[]")
    assert responses.find("a", "resp_1") is None


class Background:
    """Random work on what is made in the background; the books are proven after each step."""

    def __init__(self, max_count: int = MAX_RESPONSES, **settings: Any) -> None:
        self.max_count = max_count
        self.responses = store(max_count, **settings)
        self.settings = Settings(**settings)
        self.running: dict[tuple[str, str], RunningResponse] = {}

    def begin(self, tenant: str, response_id: str, size: int) -> None:
        request: Any = SimpleNamespace(tenant=SimpleNamespace(name=tenant), body=bytes(size))
        writer: Any = None
        log = EventLog()
        response = RunningResponse(request, writer, b"[]", log)
        with suppress(ApiError):
            self.responses.begin(response_id, response, log)
            self.running[tenant, response_id] = response

    def grow(self, tenant: str, response_id: str, size: int) -> None:
        if (running := self.running.get((tenant, response_id))) is not None and running.log is not None:
            running.log.append(b"data: " + bytes(size) + b"\n\n")

    def keep(self, tenant: str, response_id: str, size: int) -> None:
        if (running := self.running.pop((tenant, response_id), None)) is not None:
            self.responses.keep(tenant, response_id, bytes(size), b"[]", running.log)
            assert running.log is not None
            running.log.append(b"data: the end\n\n")
            self.responses.end(response_id, running)

    def delete(self, tenant: str, response_id: str, size: int) -> None:
        if (running := self.running.pop((tenant, response_id), None)) is not None:
            self.responses.end(response_id, running)
            self.grow(tenant, response_id, size)
            self.responses.keep(tenant, response_id, bytes(size), b"[]", running.log)
            assert self.responses.find(tenant, response_id) is None, "what was deleted does not come back"
        else:
            self.responses.delete(tenant, response_id)

    def check(self) -> None:
        for name, own in self.responses._by_tenant.items():
            mine = [each for (tenant, _), each in self.running.items() if tenant == name]
            entries: list[Any] = [*mine, *own.responses.values()]
            logs = [each.log for each in entries if each.log is not None]
            held = [each.num_bytes for each in entries]
            assert own.num_bytes == sum(held) + sum(log.num_bytes for log in logs)
            assert own.num_background == len(mine) <= self.settings.max_background_responses
            assert len(own.responses) + len(mine) <= self.max_count
            spare = sum(len(log._pieces[-1][1]) + 150 for log in logs if log._pieces)  # the latest piece stays
            assert own.num_bytes <= self.settings.response_store_bytes + spare


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["begin", "grow", "grow", "keep", "delete"]),
            st.sampled_from("ab"),
            st.sampled_from(["1", "2", "3"]),
            st.integers(0, MIB),
        ),
        max_size=40,
    )
)
def test_what_is_made_in_the_background_is_counted_and_leaves_nothing(steps: list[tuple[str, str, str, int]]) -> None:
    work = Background(3, response_store_bytes=2 * MIB, max_background_responses=2)
    for name, tenant, response_id, size in steps:
        getattr(work, name)(tenant, response_id, size)
        work.check()
    for tenant, response_id in [(tenant, each) for tenant in "ab" for each in "123"]:
        work.delete(tenant, response_id, 1)
    work.responses.expire(time.monotonic())
    assert work.responses._by_tenant == {}
    assert work.responses._running == {}


def test_an_id_is_used_once_at_a_time() -> None:
    work = Background()
    work.begin("a", "resp_1", 1)
    with pytest.raises(ApiError) as refused:
        work.responses.begin("resp_1", work.running["a", "resp_1"], EventLog())
    assert refused.value.status == 409
    assert work.responses.find_running("a", "resp_1") is not None
    assert work.responses.find_running("b", "resp_1") is None
