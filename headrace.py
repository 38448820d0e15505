"""What a program imports. The server is `headrace serve`, or `app:main` for any ASGI server."""

from app.library import LLM
from engine.messages import SamplingParams

__all__ = ["LLM", "SamplingParams"]

if __name__ == "__main__":
    import sys

    from app.__main__ import main

    sys.exit(main())
