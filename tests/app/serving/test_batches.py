"""The rows of a batch: what is refused as a whole, and that each is answered once, whatever ends the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import CapacityLimiter
from hypothesis import given
from hypothesis import strategies as st

from app.config.settings import Settings
from app.serving.batches import Answer, BatchRows, answer_rows
from app.serving.files import FileStore, Upload
from protocol.errors import ApiError
from protocol.openai.batches import BatchRequest, Row

CHAT: Final = "/v1/chat/completions"
OK: Answer = (200, {"x-request-id": "r"}, b'{"model":"m","usage":{"prompt_tokens":2,"completion_tokens":3}}')


def row(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": []}} | changes


def rows_of(folder: Path, lines: list[Any], max_line: int = 1000) -> BatchRows:
    source = folder / "input"
    source.write_bytes(
        b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    )
    return BatchRows(source, folder / "output", folder / "errors", max_line)


def errors_of(folder: Path, *lines: Any) -> list[tuple[str, int | None, str | None]]:
    return [(each.code, each.line, each.param) for each in rows_of(folder, list(lines)).check(CHAT)]


def custom_ids(*paths: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for path in paths for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (b"[" * 5000, "line_too_long", None),
        (b'{"custom_id":"a","body":' + b"[" * 900, "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (row(None), "invalid_request", "custom_id"),
        (row(""), "invalid_custom_id", "custom_id"),
        ({"custom_id": "a"}, "missing_required_parameter", "method"),
        (row(method="GET"), "invalid_method", "method"),
        (row(url="/v1/completions"), "invalid_url", "url"),
        (row(url="/metrics"), "invalid_url", "url"),
        (row(body=[]), "invalid_request", "body"),
        (row(body={"stream": True}), "invalid_request", "body.stream"),
        (row(body={"background": True}), "invalid_request", "body.background"),
        (row("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: Any, code: str, param: str | None) -> None:
    assert errors_of(tmp_path, row("first"), b"", line, row("last")) == [(code, 3, param)]


def test_a_file_without_lines_and_one_with_too_many_are_refused(tmp_path: Path) -> None:
    assert errors_of(tmp_path, b" ", b"") == [("empty_file", None, None)]
    assert errors_of(tmp_path, *(row(str(number)) for number in range(50_001))) == [("too_many_rows", None, None)]
    assert len(errors_of(tmp_path, *[b"{"] * 200)) == 100


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
LINES = st.one_of(
    st.binary(max_size=30).filter(lambda line: b"\n" not in line),
    ANY_JSON,
    st.builds(row, st.text("ab", max_size=2), body=ANY_JSON, url=st.sampled_from([CHAT, "/v1/responses", "/x"])),
)


@given(lines=st.lists(LINES, max_size=6))
def test_a_line_is_refused_or_can_be_read(lines: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    rows = rows_of(folder, lines)
    wrong = rows.check(CHAT)
    if not wrong:
        found = list(iter(rows.next, None))
        assert len(found) == rows.counts.total == len({each.custom_id for each in found}) > 0
        assert all(isinstance(json.loads(bytes(each.body)), dict) and each.url == CHAT for each in found)


async def test_after_any_cut_of_the_output_every_row_is_answered_once(tmp_path: Path) -> None:
    lines = [row(f"row {number}") for number in range(6)]

    async def answer(row: Row) -> Answer:
        return OK if row.custom_id != "row 2" else (400, {}, b'{"error":{}}')

    async def run() -> BatchRows:
        rows = rows_of(tmp_path, lines)
        rows.check(CHAT)
        rows.open()
        assert await answer_rows(rows, answer, CapacityLimiter(2))
        rows.close()
        return rows

    written = tmp_path / "output", tmp_path / "errors"
    whole = (await run()).counts
    assert (whole.total, whole.completed, whole.failed) == (6, 5, 1)
    output = written[0].read_bytes()
    for cut in range(0, len(output), 37):
        written[0].write_bytes(output[:cut])
        rows = await run()
        assert sorted(custom_ids(*written)) == [each["custom_id"] for each in lines]
        assert (rows.counts, rows.usage.input_tokens, rows.usage.output_tokens) == (whole, 10, 15)


async def test_a_full_queue_is_no_error_and_a_server_that_ends_leaves_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.serving.batches.LEAST_WAIT", 0.01)
    asked: list[str] = []

    async def answer(row: Row) -> Answer:
        asked.append(row.custom_id)
        match row.custom_id, asked.count(row.custom_id):
            case "full", 1 | 2:
                return 429, {"retry-after": "0"}, b'{"error":{}}'
            case "ended by the operator", _:
                return 503, {"x-should-retry": "false"}, b'{"error":{}}'
            case "the server ends", _:
                return 0, {}, b""
        return OK

    rows = rows_of(tmp_path, [row("full"), row("ended by the operator"), row("the server ends"), row("never asked")])
    rows.check(CHAT)
    rows.open()
    with anyio.fail_after(10):
        assert not await answer_rows(rows, answer, CapacityLimiter(1))
    rows.close()
    assert asked == ["full", "full", "full", "ended by the operator", "the server ends"]
    assert custom_ids(tmp_path / "output") == ["full"]
    assert custom_ids(tmp_path / "errors") == ["ended by the operator"]
    rows = rows_of(tmp_path, [row("full"), row("ended by the operator"), row("the server ends"), row("never asked")])
    rows.open()
    rows.write_rest("batch_expired", "too late")
    rows.close()
    assert custom_ids(tmp_path / "errors")[1:] == ["the server ends", "never asked"]


# ---------------------------------------------------------------------------------------------------------------- files


def keep(store: FileStore, tenant: str = "a", content: bytes = b"{}\n", seconds: int | None = None) -> str:
    upload = Upload(store, tenant)
    try:
        upload.write(content)
        return upload.keep("name", seconds).id
    finally:
        upload.close()


def test_a_tenant_has_its_own_files_and_its_own_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", Settings(files_bytes_per_tenant=2**20, max_file_bytes=2**19))
    ours = [keep(store, "a", bytes(2**19)) for _ in range(2)]
    with pytest.raises(ApiError, match="files_bytes_per_tenant") as refused:
        keep(store, "a", b"1")
    assert (refused.value.status, refused.value.code) == (400, "storage_full")
    with pytest.raises(ApiError, match="max_file_bytes") as refused:
        keep(store, "b", bytes(2**19 + 1))
    assert refused.value.status == 413
    theirs = keep(store, "b")
    assert [store.page(name, "file", after=None, limit=9, order="asc")[0] for name in "abc"] == [
        [store.find("a", "file", each) for each in ours],
        [store.find("b", "file", theirs)],
        [],
    ]
    batch = BatchRequest(input_file_id=theirs, endpoint=CHAT, completion_window="24h")
    for attempt in (
        lambda: store.find("a", "file", theirs),
        lambda: store.delete_file("a", theirs),
        lambda: store.add_batch("a", batch),
        lambda: store.page("a", "file", after=theirs, limit=1, order="asc"),
    ):
        with pytest.raises(ApiError) as missing:
            attempt()
        assert missing.value.status == 404
    store.delete_file("a", ours[0])
    keep(store, "a", b"1")
    assert {path.name for path in (tmp_path / "files").glob("upload-*")} == set()


def test_files_go_when_they_are_old_unless_a_batch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, Settings())
    now = 1_800_000_000.0
    monkeypatch.setattr("app.serving.files.time.time", lambda: now)
    read, old, young = keep(store, seconds=3600), keep(store, seconds=3600), keep(store)
    batch = json.loads(store.add_batch("a", BatchRequest(input_file_id=read, endpoint=CHAT, completion_window="24h")))
    with pytest.raises(ApiError, match=batch["id"]):
        store.delete_file("a", read)
    now += 3601
    store.sweep()
    assert {path.name for path in tmp_path.glob("file-*")} == {read, young}
    with pytest.raises(ApiError):
        store.find("a", "file", old)
    assert json.loads(store.cancel("a", batch["id"]))["status"] == "cancelling"
    [(tenant, active, is_cancelled)] = store.active()
    assert (tenant, active.id, is_cancelled) == ("a", batch["id"], True)
    active.status = "cancelled"
    store.save(active)
    assert not store.active()
    with pytest.raises(ApiError, match="cancelled"):
        store.cancel("a", batch["id"])
    now += 32 * 24 * 3600
    store.sweep()
    assert not list(tmp_path.glob("file-*"))
    assert store.page("a", "batch", after=None, limit=9, order="desc") == ([], False)


def test_a_tenant_has_few_batches_that_have_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.serving.files.MAX_ACTIVE", 2)
    store = FileStore(tmp_path, Settings())
    request = BatchRequest(input_file_id=keep(store), endpoint=CHAT, completion_window="24h")
    first = json.loads(store.add_batch("a", request))
    store.add_batch("a", request)
    with pytest.raises(ApiError, match="2 batches") as refused:
        store.add_batch("a", request)
    assert refused.value.status == 429
    ended = next(batch for _, batch, _ in store.active() if batch.id == first["id"])
    ended.status = "completed"
    store.save(ended)
    store.add_batch("a", request)


def test_pages_follow_each_other_in_both_orders(tmp_path: Path) -> None:
    store = FileStore(tmp_path, Settings())
    files = [keep(store) for _ in range(5)]
    for order, expected in (("asc", files), ("desc", files[::-1])):
        found: list[str] = []
        has_more = True
        while has_more:
            page, has_more = store.page("a", "file", after=found[-1] if found else None, limit=2, order=order)
            found += [json.loads(each)["id"] for each in page]
        assert found == expected


def test_one_server_of_a_folder_runs_its_batches(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path, Settings()), FileStore(tmp_path, Settings())
    assert first.becomes_owner()
    assert not second.becomes_owner()
    del first  # as its process does when it ends
    assert second.becomes_owner()
