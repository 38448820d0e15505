"""Renders a chat template in processes of its own, which the kernel bounds and which are killed at a deadline.

A template comes with a model's files, from whoever wrote them, and no check inside an interpreter can bound what one
expression of it takes. `protocol.template_child` is the process. It lives as long as it behaves: a rendering that is
too slow or takes too much memory, or whose caller cannot be answered, ends its process, and the next rendering starts
another. A process that has died otherwise, by whatever hand, is replaced without anybody noticing.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import jinja2
import markupsafe

from protocol.bounded_child import to_bytes
from protocol.child_process import ChildPool, ChildProcess
from protocol.jinja_sandbox import MAX_RENDERED_CHARS, Failure, RenderingFailed, too_long

logger = logging.getLogger(__name__)

_PACKAGES = (jinja2.__file__, markupsafe.__file__)
_LONGEST_ANSWER = 4 * MAX_RENDERED_CHARS  # bytes
_JSON = json.JSONEncoder(ensure_ascii=False)
_SHUTTING_DOWN = "the server is shutting down"


class TemplateProcesses:
    """A `Renderer`: as many processes as callers at once. `close` ends them, and the renderings in them.

    `timeout` bounds one rendering, in seconds, from its first byte to its last, and compiling the template. The first
    process is started here, so that a template which does not parse is known. Raises `RenderingFailed`.
    """

    def __init__(self, source: str, timeout: float) -> None:
        self._source = to_bytes(source)
        self._timeout = timeout
        self._pool = ChildPool("protocol.template_child", _PACKAGES, timeout)
        self.close = self._pool.close  # renderings in progress fail, and so does whatever comes later
        try:
            first, answer = self._start()
        except BaseException:
            self.close()
            raise
        self.variables = frozenset[str](json.loads(answer))
        self._pool.give_back(first)

    def render(self, context: dict[str, Any]) -> str:
        """The text. Blocks, for `timeout` at most and, if need be, a process's start. Threads may call it at once."""
        # In pieces, as `json.dumps` does not: it would keep the interpreter, and with it the event loop, to itself.
        message = b"".join(map(to_bytes, _JSON.iterencode(context)))
        began = time.monotonic()
        process = self._pool.take_idle()
        if process is not None:
            try:
                return self._ask(process, message, self._timeout)
            except RenderingFailed as failure:
                # It had died since its last rendering, or that one had left too little of its memory.
                if failure.kind not in (Failure.GONE, Failure.MEMORY):
                    raise
        left = self._timeout - (time.monotonic() - began)
        process, _ = self._start()
        return self._ask(process, message, left)

    def _start(self) -> tuple[ChildProcess, str]:
        """A new process that has compiled the template, and what it said of it."""
        try:
            process = self._pool.start()
        except EOFError:
            raise RenderingFailed(Failure.GONE, _SHUTTING_DOWN) from None
        return process, self._ask(process, self._source, self._timeout, idle=False)

    def _ask(self, process: ChildProcess, message: bytes, seconds: float, *, idle: bool = True) -> str:
        """The answer. Afterwards the process is `idle`, or else its caller's, or has ended if it is of no more use."""
        usable = False
        try:
            if self._pool.is_closed:
                raise RenderingFailed(Failure.GONE, _SHUTTING_DOWN)
            kind, text = process.exchange(message, seconds, _LONGEST_ANSWER)
            if len(text) > MAX_RENDERED_CHARS:
                raise too_long()
            if kind:
                raise RenderingFailed(Failure(kind), text)
            usable = True
            return text
        except TimeoutError:
            logger.warning("The chat template was ended after %g s (template_timeout)", self._timeout)
            words = f"it takes longer than {self._timeout:g} s; send a shorter conversation"
            raise RenderingFailed(Failure.TIME, words) from None
        except (OSError, EOFError, UnicodeDecodeError):
            raise RenderingFailed(Failure.GONE, "its process has ended") from None
        except RenderingFailed as failure:
            usable = failure.kind in (Failure.UNSAFE, Failure.UNFIT, Failure.TOO_LONG)
            raise
        finally:
            if not usable:
                self._pool.end(process)
            elif idle:
                self._pool.give_back(process)
