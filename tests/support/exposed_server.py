"""A server as strangers meet it, and what is asked of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY, OTHER_KEY = "sk-advisory-one", "sk-advisory-two"
MIB = 2**20
BODY_LIMIT = 8 * MIB


@contextmanager
def exposed_server() -> Iterator[Server]:
    with tiny_server(api_keys=f"{KEY},{OTHER_KEY}", max_body_bytes=BODY_LIMIT, body_timeout=4) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running.wait_ready()


def assert_well(server: Server) -> None:
    assert server.complete("Hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    now = server.wait_idle()
    assert now.finished["error"] == 0
    assert not [name for name, count in now.samples.items() if "status=5xx" in name and "readyz" not in name and count]
    assert "Traceback" not in server.log
    assert KEY not in server.log
