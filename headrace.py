"""What a program imports. The server is `headrace serve`, or `app:main` for any ASGI server."""

from app.config.settings import SettingsError
from app.library import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from engine.errors import ConfigError, EngineDead, HeadraceError, InvalidRequest, RequestFailed
from engine.frontend.llm import Completion as CompletionOutput
from engine.frontend.llm import Generation as RequestOutput
from gpu.checkpoint import ModelError

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EngineDead",
    "HeadraceError",
    "InvalidRequest",
    "ModelError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SettingsError",
    "StructuredOutputsParams",
]

if __name__ == "__main__":
    import sys

    from app.__main__ import main

    sys.exit(main())
