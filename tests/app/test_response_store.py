"""The memory of responses stays within its bounds, and within its tenants."""

from __future__ import annotations

import time
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.response_store import ResponseStore
from app.settings import Settings

MIB = 2**20


def store(**settings: Any) -> ResponseStore:
    return ResponseStore(Settings(**settings))


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
    sizes=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 2 * MIB)), max_size=30),
    count=st.integers(1, 5),
)
def test_there_are_never_too_many_or_too_large_and_the_oldest_go_first(sizes, count):
    responses = store(response_store_size=count, response_store_bytes=2 * MIB)
    kept: dict[str, list[tuple[str, int]]] = {"a": [], "b": []}
    for tenant, number, size in sizes:
        response_id = f"resp_{number}"
        responses.keep(tenant, response_id, bytes(size), b"[]")
        mine = [entry for entry in kept[tenant] if entry[0] != response_id]
        mine.append((response_id, size + 2 + 512))
        while len(mine) > count or sum(cost for _, cost in mine) > 2 * MIB:
            mine.pop(0)
        kept[tenant] = mine
        for owner, entries in kept.items():
            found = {f"resp_{n}" for n in range(10) if responses.find(owner, f"resp_{n}") is not None}
            assert found == {entry_id for entry_id, _ in entries}


def test_what_is_too_old_is_dropped():
    responses = store(response_store_age=600.0)
    responses.keep("a", "resp_1", body("old"), b"[]")
    responses.expire(time.monotonic() + 599)
    assert responses.find("a", "resp_1") is not None
    responses.expire(time.monotonic() + 601)
    assert responses.find("a", "resp_1") is None


def test_a_store_of_no_size_keeps_nothing():
    responses = store(response_store_size=0)
    assert responses.is_off
    responses.keep("a", "resp_1", body("a"), b"[]")
    assert responses.find("a", "resp_1") is None
