"""What a running server reads again at SIGHUP: the tenants of `api_keys_file`."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from app.settings import Settings, SettingsError
from app.tenants import Tenants

if TYPE_CHECKING:
    from app.server import Server  # which takes long to import, and nothing may come before `ignore_hangup`

logger = logging.getLogger(__name__)

_STAYS = "api_keys, admin_keys and other settings stay as they were at the start"


def ignore_hangup(settings: Settings) -> None:
    """Until `reload_on_hangup`, and after it: SIGHUP would end the process."""
    if _takes_hangup(settings):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def reload_on_hangup(server: Server) -> None:
    """Take SIGHUP from now on. Who is gone from the file is refused at once; requests that run keep what they had. Of a
    file that is wrong nothing is taken."""
    settings = server.settings
    if not _takes_hangup(settings):
        return
    before = signal.getsignal(signal.SIGHUP)
    try:
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                if settings.api_keys_file is None:
                    logger.warning("Nothing was read again: %s, and there is no api_keys_file", _STAYS)
                    continue
                try:
                    tenants = await to_thread.run_sync(Tenants, settings)
                except SettingsError as error:
                    logger.error("Tenants and keys stay what they were. %s", error)
                else:
                    server.tenants.replace(tenants)
                    server.admission.set_tenants(tenants.all)
                    server.metrics.set_tenants({tenant.name for tenant in tenants.all}, busy=server.busy_tenants)
                    logger.info("Tenants and keys were read again, tenants: %d; %s", len(tenants.all), _STAYS)
    finally:
        signal.signal(signal.SIGHUP, before)  # asyncio leaves the default


def _takes_hangup(settings: Settings) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return settings.api_keys_file is not None or not os.isatty(0)  # in a terminal it means that this is gone
