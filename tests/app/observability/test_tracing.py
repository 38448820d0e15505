"""When requests are traced, and what is said when they cannot be. What a trace shows: test_tracing_served.py."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from app.config.settings import Settings, SettingsError
from app.observability.tracing import NoTracer, open_tracer

ENDPOINT = "http://127.0.0.1:4318"


def opened(settings: Settings) -> object:
    return open_tracer(settings, lambda reason, count: None)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "app.observability.spans", raising=False)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)  # what a missing package looks like to `import`


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from app.config.settings import Settings; from app.observability.tracing import open_tracer;"
        "import app.http.record, app.serving.generation;"
        "open_tracer(Settings(), print).close(); sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_can_turn_it_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert isinstance(opened(Settings(otlp_endpoint=ENDPOINT)), NoTracer)


@pytest.mark.parametrize("setting", [{"trace_messages": True}], ids=str)
def test_settings_of_traces_without_a_collector_are_refused(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=f"{min(setting)} has no effect without a collector of traces"):
        opened(Settings(**setting))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")  # it was turned off on purpose
    assert isinstance(opened(Settings(**setting)), NoTracer)


@pytest.mark.usefixtures("not_installed")
def test_an_endpoint_without_the_extra_says_what_to_install() -> None:
    with pytest.raises(SettingsError, match=r"pip install '\.\[otel\]' in a clone"):
        opened(Settings(otlp_endpoint=ENDPOINT))


@pytest.mark.usefixtures("not_installed")
def test_an_endpoint_of_the_environment_without_the_extra_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    with caplog.at_level(logging.WARNING):
        assert isinstance(opened(Settings()), NoTracer)
    assert "pip install '.[otel]' in a clone" in caplog.text


def test_what_opentelemetry_refuses_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0")
    with pytest.raises(SettingsError, match="max_export_batch_size must be a positive integer"):
        opened(Settings(otlp_endpoint=ENDPOINT))
