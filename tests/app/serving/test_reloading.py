"""SIGHUP around the life of an application; tests/app/admission/test_tenants.py has what it does in it."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import pytest

from app.config.settings import Settings
from app.serving.model_pool import ModelPool
from app.serving.process import ignore_hangup, reload_on_hangup
from app.serving.server import Server


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_hangup_after_the_end_of_the_application_is_ignored(backend: str, tmp_path: Path) -> None:
    """Or else asyncio leaves the default, which ends the process while it drains its traces."""
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.acme]\nkeys = ['a-secret']\n")
    settings = Settings(api_keys_file=file)
    before = signal.getsignal(signal.SIGHUP)

    async def serve() -> None:
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(reload_on_hangup, ModelPool(Server(settings), on_fatal=print))
            while signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # noqa: ASYNC110 - there is nothing else to wait for
                await anyio.sleep(0.001)
            task_group.cancel_scope.cancel()

    try:
        ignore_hangup(settings)
        anyio.run(serve, backend=backend)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
