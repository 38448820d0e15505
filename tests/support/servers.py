"""The servers that several test files share. Each starts when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.support.harness import Server
from tests.support.tiny_model import LONG_CONTEXT, deployed_tiny_server

INTEGRATION = Path(__file__).parents[1] / "integration"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default event loop and a batch of 64: what the functional tests talk to."""
    with Server("uvloop", max_num_seqs=64) as running:
        yield running.wait_ready()


@contextmanager
def _well(server: Server) -> Iterator[Server]:
    with server:
        yield server.wait_ready()
        assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="session")
def narrow_servers() -> Iterator[Callable[[str], Server]]:
    """Each is started once: a parameter's server would end wherever the next test asks for another."""
    with ExitStack() as stack:
        settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_queue_time": 0}
        yield cache(lambda name: stack.enter_context(_well(Server(name, **settings))))


@pytest.fixture(scope="session")
def narrow_server(request: pytest.FixtureRequest, narrow_servers: Callable[[str], Server]) -> Server:
    """A server on which a request's phases last: five running slots, and prompts that are computed 32 tokens a step.

    Parametrized with Hypercorn's worker class. Filling the running slots makes the next request wait; a long prompt
    takes many steps; between two steps the server has time to notice whatever a test does.
    """
    return narrow_servers(request.param)


@pytest.fixture(scope="session")
def narrow_tiny_servers() -> Iterator[Callable[[str], Server]]:
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_queued_requests": 16, "sse_keep_alive": 0.2}
    with ExitStack() as stack:

        def start(name: str) -> Server:
            return stack.enter_context(
                _well(deployed_tiny_server(name, max_model_len=LONG_CONTEXT, allowed_hosts="headrace", **settings))
            )

        yield cache(start)


@pytest.fixture(scope="session")
def narrow_tiny_server(request: pytest.FixtureRequest, narrow_tiny_servers: Callable[[str], Server]) -> Server:
    """As narrow as `narrow_server`, with the shipped deploy/hypercorn.toml and a model of a very long context.

    Sixteen choices fill its queue, and a silent stream gets five comments a second.
    """
    return narrow_tiny_servers(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that import `tests.support` as `seconds`, and those of `tests/integration` as `slow`."""
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.slow)
        values = vars(item.module).values() if isinstance(item, pytest.Function) else ()
        if any(str(getattr(value, "__module__", "")).startswith("tests.support.") for value in values):
            item.add_marker(pytest.mark.seconds)
