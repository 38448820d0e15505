"""A browser and servers, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.harness import Server
from tests.support.pages import chromium
from tests.support.tiny_model import tiny_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=4) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def governed_server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=4, api_keys="client", admin_keys="operator") as running:
        yield running.wait_ready()
