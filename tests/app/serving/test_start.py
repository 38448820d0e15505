"""From exec to ready, and to an exit that a supervisor understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server, tiny_settings


class CardServer(Server):
    """A server on a card that compiles and runs nothing."""

    def command(self) -> list[str]:
        return ["tests.gpu.fake_card", "serve", "--port", str(self.port), "--worker-class", self.worker_class]


@pytest.mark.slow
def test_port_answers_while_the_model_is_still_loading() -> None:
    with Server("uvloop", dtype="float32") as server:  # which takes longest to load
        first = server.poll(lambda: server.get_or_none("/startupz"), lambda answer: answer is not None)
        assert first is not None
        assert first.status_code == 503
        assert first.json()["phase"] == "starting", "the first thing that the port says"

        assert server.client.get("/livez").status_code == 200, "loading is no reason for a restart"
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/metrics").status_code == 200
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
            early = server.post(path, body)
            assert early.status_code == 503
            assert int(early.headers["retry-after"]) > 0
            assert early.json()["error"]["code"] == "model_loading"
        assert server.client.get("/startupz").json()["phase"] == "starting", "all of this came before it was loaded"

        server.wait_ready()
        assert server.client.get("/startupz").status_code == 200
        assert server.client.get("/health").status_code == 200
        assert server.chat("Hello", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert server.stop() == 0


@pytest.mark.slow
def test_startupz_counts_the_kernels_that_are_compiled_and_sigterm_ends_their_compilation(tmp_path: Path) -> None:
    settings: dict[str, Any] = tiny_settings(dtype="float16", num_threads=1)
    server = CardServer(**settings)
    server.environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    with server:
        found = server.poll(
            lambda: server.get_or_none("/startupz"),
            lambda answer: (
                answer is not None and answer.json()["total"] and answer.json()["task"] == "Compiling kernels"
            ),
        )
        assert found is not None
        assert 0 < found.json()["done"] < found.json()["total"]
        assert server.stop() == 0
        assert "has not ended" not in server.log
    assert len(list(tmp_path.glob("*/*.cubin"))) < found.json()["total"]


def test_model_that_does_not_exist_ends_the_process_and_the_last_line_names_it(tmp_path: Path) -> None:
    model = tmp_path / "no-such-model.gguf"
    with Server("uvloop", model=model) as server:
        assert server.wait_exit() != 0
        assert str(model) in server.log.splitlines()[-1]


def test_setting_that_cannot_be_ends_the_process_and_names_itself() -> None:
    with Server("asyncio", max_num_seqs=0) as server:
        assert server.wait_exit() != 0
        assert "max_num_seqs" in server.log.lower()


@pytest.mark.slow
def test_a_failure_beside_the_requests_ends_the_process() -> None:
    """Here of what tells systemd that the server is alive. It would else answer for ever that it is shutting down."""
    server = tiny_server()
    server.environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"}
    with server:
        assert server.wait_exit() != 0
        assert server.log.splitlines()[-1] == "error: ValueError: could not convert string to float: 'soon'"
