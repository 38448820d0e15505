"""What the log promises to people, to machines and to those whose prompts pass by."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hpack
import pytest
import structlog
from hypercorn.config import Config

from app.config.settings import Settings
from app.http.record import AccessRecord, Seldom
from app.observability.logs import bind, configure_logging, log_ready, log_refusal, log_request
from app.serving.loading import make_executor, open_files
from gpu.parallel.multiproc import MultiprocExecutor
from protocol.errors import ApiError
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root, hypercorn = logging.getLogger(), logging.getLogger("hypercorn.error")
    handlers, level, filters, own = root.handlers[:], root.level, hypercorn.filters[:], hypercorn.handlers[:]
    yield
    root.handlers[:], hypercorn.filters[:], hypercorn.handlers[:] = handlers, filters, own
    root.setLevel(level)
    structlog.reset_defaults()


def log_to_text(log_format: str = "auto", log_level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(Settings(log_format=log_format, log_level=log_level), stream)
    return stream


def a_request(**changes: Any) -> None:
    known: dict[str, Any] = {
        "request_id": "chatcmpl-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "/v1/chat/completions",
        "model": "tiny",
        "status": 200,
        "arrival_time": 0.0,
        "ended_time": 1.23456,
        "finish_reason": "stop",
        "num_prompt_tokens": 31,
        "num_output_tokens": 8,
    }
    log_request(AccessRecord(**(known | changes)))


def test_headers_of_http2_are_not_logged() -> None:
    stream = log_to_text(log_level="debug")
    header = ("x-api-key", "a-secret-key")
    hpack.Decoder().decode(hpack.Encoder().encode([header]))
    assert stream.getvalue() == ""


def test_a_request_is_one_readable_line_in_a_terminal() -> None:
    stream = log_to_text("console")
    a_request()
    (line,) = stream.getvalue().splitlines()
    assert "POST /v1/chat/completions" in line
    assert "status=200 seconds=1.235 finish_reason=stop prompt_tokens=31 output_tokens=8" in line
    assert "error" not in line


def test_a_request_is_one_json_object_where_nobody_looks() -> None:
    stream = log_to_text("auto")
    a_request(status=500, error="engine_dead")
    entry = json.loads(stream.getvalue())
    assert entry["event"] == "request"
    assert entry["level"] == "error"
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/chat/completions", 500)
    assert entry["error"] == "engine_dead"
    assert "ttft_seconds" not in entry


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_client_cannot_forge_a_line_or_steer_the_terminal(log_format: str) -> None:
    stream = log_to_text(log_format)
    a_request(path="/v1/x\n12:00:00 [info] forged\x1b[2J", error="m\r\x07\u202e")
    assert len(stream.getvalue().splitlines()) == 1
    assert not set(stream.getvalue()) & set("\x1b\r\x07\u202e")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    stream = log_to_text(log_format)
    prompt = "my " + "secret"
    try:
        len(prompt) / 0
    except ZeroDivisionError:
        structlog.get_logger("headrace").exception("request failed")
        logging.getLogger("some.library").exception("request failed")
    assert stream.getvalue().count("ZeroDivisionError") == 2
    assert "my secret" not in stream.getvalue()


def test_the_request_line_has_no_place_for_text() -> None:
    allowed = {"method", "path", "route", "model", "request_id", "finish_reason", "error", "param"}
    text = {field.name for field in fields(AccessRecord) if "str" in str(field.type)}
    assert text == allowed


async def test_hypercorns_lines_come_once_and_in_our_form(capsys: pytest.CaptureFixture[str]) -> None:
    stream = log_to_text("json")
    hypercorn_log = Config().log  # installs a handler of its own, on standard error
    await hypercorn_log.info("Waiting for %s", "its end")
    await hypercorn_log.debug("unheard")
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["logger"]) == ("Waiting for its end", "hypercorn")
    sys.stderr.flush()
    assert "Waiting" not in capsys.readouterr().err


def test_the_address_is_logged_when_the_models_are_loaded() -> None:
    stream = log_to_text("json")
    hypercorn = logging.getLogger("hypercorn.error")
    hypercorn.warning("Running on http://127.0.0.1:8000 (CTRL + C to quit)")
    assert stream.getvalue() == "", "a wrong model is refused later"
    log_ready(1.23)
    assert json.loads(stream.getvalue())["event"] == (
        "Ready after 1.2 s at http://127.0.0.1:8000, with the dashboard at http://127.0.0.1:8000/dashboard"
    )
    stream = log_to_text("json")
    log_ready(2)
    hypercorn.warning("Running on http://unix:/run/headrace.sock (CTRL + C to quit)")
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["Ready after 2.0 s", "Listening at unix:/run/headrace.sock"]


def test_a_flood_of_wrong_keys_is_counted_and_not_logged_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("app.http.record.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("app.observability.logs._refusals", Seldom(20))
    stream = log_to_text("json")
    error = ApiError(401, "no", code="invalid_api_key")
    scope = {"method": "GET", "path": "/v1/models", "client": ("10.0.0.9", 1), "headers": [(b"x-api-key", b"sk-old")]}
    for _ in range(1000):
        log_refusal(scope, error)
    now = 11.0
    log_refusal(scope, error)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 22
    assert (lines[0]["client"], lines[0]["error"], lines[0]["status"]) == ("10.0.0.9", "invalid_api_key", 401)
    assert lines[20]["event"] == "980 more requests without a valid key were not logged"
    assert "sk-" not in stream.getvalue()


def test_less_than_the_level_is_not_logged() -> None:
    stream = log_to_text(log_level="warning")
    a_request()
    logging.getLogger("hypercorn.error").info("hello")
    structlog.get_logger("headrace").warning("careful")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["careful"]


def test_configuring_twice_logs_once() -> None:
    log_to_text()
    stream = log_to_text()
    a_request()
    logging.getLogger("hypercorn.error").warning("hello")
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.seconds
def test_what_a_rank_logs_looks_like_what_the_server_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    settings = Settings(model=model, load_format="dummy", executor="mp", device="cpu", log_format="json")
    bind(engine=3)
    try:
        executor = make_executor(settings, open_files(settings, None), 1.0)
    finally:
        structlog.contextvars.clear_contextvars()
    assert isinstance(executor, MultiprocExecutor)
    ended = threading.Event()
    executor.watch(lambda error: ended.set())
    executor._ring.write(b"no message of ours", lambda: None)
    assert ended.wait(60)
    executor.shutdown()
    [line] = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["level"]) == ("this rank ends", "critical")
    assert (line["engine"], line["rank"]) == (3, 0)
    assert "ValidationError" in line["exception"]
