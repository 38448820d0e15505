"""`app:main`, for tests of KV tiers on a machine where others compute: loading is believed to be cheaper than computing
again, and is waited for. What decides about that by measured times is tested in tests/gpu and tests/engine.
"""

import engine.scheduler.tiers
import gpu.kv_tiers.tier
from app import main
from tests.support.harness import TIMEOUT

__all__ = ["main"]

engine.scheduler.tiers.PATIENCE = TIMEOUT
gpu.kv_tiers.tier.OPENING_SECONDS = TIMEOUT
gpu.kv_tiers.tier.KVTier.is_cheaper = lambda self, seconds: True  # type: ignore[method-assign]
