"""A server with tenants of a file, and requests with their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.support.harness import Server
from tests.support.raw_client import RawClient

COMPLETIONS = "/v1/completions"


@contextmanager
def tenant_server(
    make: Callable[..., Server], folder: Path, tenants: str, key: str, **settings: object
) -> Iterator[Server]:
    """Yield the server that `make` makes, ready, with the file `tenants`. Requests without a key get `key`."""
    file = folder / "tenants.toml"
    file.write_text(tenants)
    with make(api_keys_file=file, **settings) as running:
        running.client.headers["authorization"] = f"Bearer {key}"
        yield running.wait_ready()


def ask(server: Server, key: str, path: str = COMPLETIONS, *, request_id: str = "", **fields: object) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 1, "ignore_eos": True, **fields}
    named = {"x-request-id": request_id} if request_id else {}
    return server.post(path, body, authorization=f"Bearer {key}", **named)


def connect(server: Server, stack: ExitStack, key: str, **fields: object) -> RawClient:
    """A request of a tenant on a connection of its own, sent and not waited for."""
    client = stack.enter_context(server.connect())
    body = {"prompt": "Hi", "ignore_eos": True, "temperature": 0, **fields}
    client.post(COMPLETIONS, body, {"authorization": f"Bearer {key}"})
    return client
