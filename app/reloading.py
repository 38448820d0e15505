"""What a running server reads again at SIGHUP: the tenants of `api_keys_file`."""

from __future__ import annotations

import logging
import os
import signal
import threading

import anyio
from anyio import to_thread

from app.server import Server
from app.settings import SettingsError
from app.tenants import Tenants

logger = logging.getLogger(__name__)


async def reload_on_hangup(server: Server) -> None:
    """Take SIGHUP from now on. Who is gone from the file is refused at once; requests that run keep what they had. Of a
    file that is wrong nothing is taken."""
    settings = server.settings
    if threading.current_thread() is not threading.main_thread():
        return
    if settings.api_keys_file is None and os.isatty(0):
        return  # there it means that the terminal is gone
    with anyio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            try:
                tenants = await to_thread.run_sync(Tenants, settings)
            except SettingsError as error:
                logger.error("Tenants and keys stay what they were. %s", error)
            else:
                server.tenants.replace(tenants)
                server.admission.set_tenants(tenants.all)
                server.metrics.add_tenants(tenant.name for tenant in tenants.all)
                logger.info("Tenants and keys were read again: %d tenants", len(tenants.all))
