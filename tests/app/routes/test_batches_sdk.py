"""/v1/files and /v1/batches with OpenAI's SDK, and with forms that no SDK sends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

MAX_FILE = 4 * 2**20
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/embeddings": {"input": ["Hello", "you"]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("files")
    settings: dict[str, Any] = {"api_keys": "one,two", "max_file_bytes": MAX_FILE, "body_timeout": 3}
    with tiny_server(files_dir=folder, **settings) as running:
        running.client.headers["authorization"] = "Bearer one"
        yield running.wait_ready()


def client_of(server: Server, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)


def rows(endpoint: str, *bodies: dict[str, Any]) -> bytes:
    lines = (
        {"custom_id": f"row {n}", "method": "POST", "url": endpoint, "body": body} for n, body in enumerate(bodies)
    )
    return "\n".join(map(json.dumps, lines)).encode()


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch_id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def run(client: openai.OpenAI, endpoint: Any, content: bytes) -> Any:
    file = client.files.create(file=content, purpose="batch")
    return ended(client, client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h").id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).content.splitlines()]


def test_files_come_back_as_they_were_and_in_pages(server: Server) -> None:
    client = client_of(server)
    content = b"\r\n--x\r\n" * 100_000  # looks like boundaries
    with Path(__file__).open("rb") as this:
        files = [
            client.files.create(file=("../../etc/passwd", content), purpose="batch"),
            client.files.create(file=this, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}),
            client.files.create(file=("empty.jsonl", b""), purpose="batch"),
        ]
    assert [file.filename for file in files] == ["passwd", Path(__file__).name, "empty.jsonl"]
    assert [(file.expires_at or 0) - file.created_at for file in files] == [30 * 86400, 3600, 30 * 86400]
    assert client.files.content(files[0].id).content == content
    assert client.files.content(files[2].id).content == b""
    assert client.files.retrieve(files[1].id) == files[1]
    newest = [file.id for file in client.files.list(limit=1)][:3]  # iterating asks for page after page
    assert newest == [file.id for file in reversed(files)]
    assert [file.id for file in client.files.list(order="asc", purpose="batch", after=files[0].id)] == newest[1::-1]
    assert not list(client.files.list(purpose="batch_output"))
    for file in files:
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


@pytest.mark.parametrize("endpoint", ASKED)
def test_a_row_has_the_answer_that_its_route_gives(server: Server, endpoint: str) -> None:
    client, body = client_of(server), {"model": "tiny", **ASKED[endpoint]}
    if "embeddings" not in endpoint:
        body["temperature"] = 0
    batch = run(client, endpoint, rows(endpoint, body, body | {"model": "other"}, body | {"model": 5}))
    assert (batch.status, batch.model, batch.endpoint) == ("completed", "tiny", endpoint)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    [answered] = lines_of(client, batch.output_file_id)
    assert (answered["custom_id"], answered["error"], answered["response"]["status_code"]) == ("row 0", None, 200)
    headers = {"authorization": "Bearer one", "x-request-id": answered["response"]["request_id"]}
    by_route = httpx.post(server.base_url + endpoint, json=body, headers=headers, trust_env=False, timeout=60).json()
    by_row = answered["response"]["body"]
    for when in ("created", "created_at", "completed_at"):
        by_route.pop(when, None)
        by_row.pop(when, None)
    for usage in (by_route["usage"], by_row["usage"]):  # the batch has its own part of the prefix cache
        usage.pop("prompt_tokens_details", None)
        usage.pop("input_tokens_details", None)
    assert by_row == by_route
    assert batch.usage.total_tokens == by_route["usage"]["total_tokens"]
    failed = {line["custom_id"]: line["response"] for line in lines_of(client, batch.error_file_id)}
    assert failed["row 1"]["body"]["error"]["code"] == "model_not_found"
    assert (failed["row 2"]["status_code"], failed["row 2"]["body"]["error"]["param"]) == (400, "model")


def test_a_wrong_file_fails_the_batch_with_every_line_named(server: Server) -> None:
    client, endpoint = client_of(server), "/v1/completions"
    content = rows(endpoint, {"prompt": "a", "stream": True}, {"prompt": "b"}) + b"\n{]\n" + rows(endpoint, {})
    batch = run(client, endpoint, content)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (1, "invalid_request", "body.stream"),
        (3, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
    ]
    with pytest.raises(openai.ConflictError, match="failed"):
        client.batches.cancel(batch.id)


def test_a_file_that_is_not_on_the_disk_any_more_is_missed_by_clients_and_ends_its_batch(server: Server) -> None:
    client, endpoint = client_of(server), "/v1/completions"
    file = client.files.create(file=rows(endpoint, {"prompt": "a"}), purpose="batch")
    (Path(str(server.setting("files_dir"))) / file.id).unlink()
    with pytest.raises(openai.NotFoundError, match=file.id):
        client.files.content(file.id)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ended(client, batch.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "missing_file")


def test_cancel_ends_running_rows_and_keeps_what_is_answered(server: Server) -> None:
    client, endpoint = client_of(server), "/v1/completions"
    short, long = {"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 8000, "ignore_eos": True}
    file = client.files.create(file=rows(endpoint, short, short, *[long] * 40), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "a test"}
    )
    server.poll(server.metrics, lambda now: now.running > 0)
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata) == ("cancelled", {"for": "a test"})
    assert batch.cancelling_at <= batch.cancelled_at
    assert {line["custom_id"] for line in lines_of(client, batch.output_file_id)} <= {"row 0", "row 1"}
    server.wait_idle()
    assert client.files.delete(file.id).deleted


def test_tenants_do_not_see_each_other(server: Server) -> None:
    ours, theirs = client_of(server), client_of(server, "two")
    batch = run(ours, "/v1/embeddings", rows("/v1/embeddings", ASKED["/v1/embeddings"]))
    for file_id in (batch.input_file_id, batch.output_file_id):
        for of_file in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                of_file(file_id)
    for of_batch in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            of_batch(batch.id)
    with pytest.raises(openai.NotFoundError):
        theirs.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/embeddings", completion_window="24h")
    assert not list(theirs.files.list())
    assert not list(theirs.batches.list())
    assert next(iter(ours.batches.list(limit=1))).id == batch.id


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = (b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + body for head, body in parts)
    return b"\r\n".join(lines) + b"\r\n--b--\r\n"


FILE, PURPOSE = ('name="file"; filename="f"', b"{}"), ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("kind", "body", "status", "word"),
    [
        ("application/json", b"{}", 400, "boundary"),
        ("multipart/form-data", form(FILE, PURPOSE), 400, "boundary"),
        ("multipart/form-data; boundary=" + "c" * 300, b"", 400, "oundary"),
        ("multipart/form-data; boundary=c", form(FILE, PURPOSE), 400, "boundary"),
        ("multipart/form-data; boundary=b", form(FILE, PURPOSE)[:-8], 400, "last boundary"),
        ("multipart/form-data; boundary=b", b"", 400, "last boundary"),
        ("multipart/form-data; boundary=b", form(FILE), 400, "purpose"),
        ("multipart/form-data; boundary=b", form(PURPOSE), 400, "file"),
        ("multipart/form-data; boundary=b", form(FILE, ('name="purpose"', b"fine-tune")), 400, "batch"),
        ("multipart/form-data; boundary=b", form(FILE, FILE, PURPOSE), 400, "one file"),
        ("multipart/form-data; boundary=b", form(*[(f'name="{n}"', b"") for n in range(99)]), 400, "fields"),
        ("multipart/form-data; boundary=b", form(('name="purpose"', b"b" * 9999), FILE), 400, "4096"),
        ("multipart/form-data; boundary=b", form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"1")), 400, "after"),
        (
            "multipart/form-data; boundary=b",
            form(*[(f'name="expires_after[{n}]"', b"") for n in range(99)]),
            400,
            "fields",
        ),
        (
            "multipart/form-data; boundary=b",
            form(('name="expires_after"', b"x"), ('name="expires_after[seconds]"', b"1"), FILE, PURPOSE),
            400,
            "after",
        ),
        ("multipart/form-data; boundary=b", form(("x" * 9999, b"{}"), PURPOSE), 400, "form"),
        ("multipart/form-data; boundary=b", form((FILE[0], bytes(MAX_FILE + 1)), PURPOSE), 413, "max_file_bytes"),
        ("multipart/form-data; boundary=b", form((FILE[0], bytes(2 * MAX_FILE)), PURPOSE), 413, "max_file_bytes"),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(
    server: Server, kind: str, body: bytes, status: int, word: str
) -> None:
    headers = {"content-type": kind, "authorization": "Bearer one"}
    answer = server.client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"]
    assert not list(Path(str(server.setting("files_dir"))).glob("upload-*"))


@pytest.mark.parametrize("ends", ["cut", pytest.param("slow", marks=pytest.mark.slow)])
def test_an_upload_that_does_not_arrive_leaves_nothing(server: Server, ends: str) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: 1000000\r\n"
    head += b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    folder = Path(str(server.setting("files_dir")))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + form((FILE[0], bytes(500_000)))[:400_000])
        server.poll(lambda: list(folder.glob("upload-*")), bool)
        if ends == "slow":
            connection.settimeout(60)
            assert b"408" in connection.recv(1000).split(b"\r\n")[0]
    server.poll(lambda: list(folder.glob("upload-*")), lambda left: not left)


def test_without_a_folder_the_answer_names_the_setting(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from app.application import create_app
    from app.config.settings import Settings

    answer = TestClient(create_app(Settings())).post("/v1/files")
    assert (answer.status_code, "files_dir" in answer.json()["error"]["message"]) == (404, True)
