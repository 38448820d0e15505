"""`app:main` with a fleet that follows the queue within seconds: `hypercorn tests.integration.cluster.hurried:main`."""

from __future__ import annotations

from app import main
from engine.routing import router

__all__ = ["main"]

router.UPSCALE_SECONDS, router.DOWNSCALE_SECONDS = 1.0, 8.0
