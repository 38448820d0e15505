"""`app:main` with a fleet that follows the queue within seconds: `hypercorn tests.cluster.hurried:main`."""

from __future__ import annotations

from app import main
from engine.routing import fleet_size

__all__ = ["main"]

fleet_size.UPSCALE_SECONDS, fleet_size.DOWNSCALE_SECONDS = 1.0, 8.0
