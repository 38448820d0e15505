"""The servers that the tests of this folder share. Each starts when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import Server
from tests.server.tiny_model import LONG_CONTEXT, deployed_tiny_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default event loop and a batch of 64: what the functional tests talk to."""
    with Server("uvloop", max_num_seqs=64) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def narrow_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server on which a request's phases last: five running slots, and prompts that are computed 32 tokens a step.

    Parametrized with Hypercorn's worker class. Filling the running slots makes the next request wait; a long prompt
    takes many steps; between two steps the server has time to notice whatever a test does.
    """
    with Server(request.param, max_num_seqs=5, max_num_batched_tokens=32) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def narrow_tiny_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """As narrow as `narrow_server`, with the shipped deploy/hypercorn.toml and a model of a very long context.

    Sixteen choices fill its queue, and a silent stream gets a comment twice a second.
    """
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_queued_requests": 16, "sse_keep_alive": 0.5}
    with deployed_tiny_server(request.param, max_model_len=LONG_CONTEXT, **settings) as running:
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log
