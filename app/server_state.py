"""What a server is at a moment: its phase, how far loading is, and what there is once the model is loaded."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.prompts import PromptEncoder
    from engine.frontend.async_llm import AsyncLLM
    from engine.messages import EngineReady
    from gpu.checkpoint import Embedder

logger = logging.getLogger(__name__)


class Phase(enum.StrEnum):
    """STARTING → READY → STOPPING; FAILED from anywhere. LEAVING, before STOPPING, is not ready but serves."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Everything that exists once the model is loaded."""

    llm: AsyncLLM
    prompts: PromptEncoder
    root: str  # the weights' own name
    embedding_size: int
    embedder: Embedder
    engine_info: EngineReady
    default_sampling: Mapping[str, float | None]  # for requests that leave it open
    chat_parameters: Mapping[str, float]  # which chats with a person add
    tokenizer_info: dict[str, Any]
    fingerprint: str  # of the model and of how it is computed


@dataclass(kw_only=True)
class StartUp:
    """How far loading is. Written by the thread that loads, read by the event loop."""

    task: str = "Starting"
    done: int = 0
    total: int | None = None

    def report(self, phase: str, done: int, total: int | None) -> None:
        """A `gpu.checkpoint.Progress`."""
        if phase != self.task:
            logger.info("%s", phase)
        self.task, self.done, self.total = phase, done, total
