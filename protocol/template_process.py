"""Renders a chat template in processes of its own, which the kernel bounds and which are killed at a deadline.

A template comes with a model's files, from whoever wrote them, and no check inside an interpreter can bound what one
expression of it takes. `protocol.template_child` is the process. It lives as long as it behaves: a rendering that is
too slow or takes too much memory, or whose caller cannot be answered, ends its process, and the next rendering starts
another. A process that has died otherwise, by whatever hand, is replaced without anybody noticing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import jinja2
import markupsafe

from protocol.bounded_child import to_bytes
from protocol.child_process import ChildProcess
from protocol.jinja_sandbox import MAX_RENDERED_CHARS, Failure, RenderingFailed, too_long

logger = logging.getLogger(__name__)

_PACKAGES = (jinja2.__file__, markupsafe.__file__)
_LONGEST_ANSWER = 4 * MAX_RENDERED_CHARS  # bytes
_JSON = json.JSONEncoder(ensure_ascii=False)


class TemplateProcesses:
    """A `Renderer`: as many processes as callers at once. `close` ends them, and the renderings in them.

    `timeout` bounds one rendering, in seconds, from its first byte to its last, and compiling the template. The first
    process is started here, so that a template which does not parse is known. Raises `RenderingFailed`.
    """

    def __init__(self, source: str, timeout: float) -> None:
        self._source = to_bytes(source)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._processes: set[ChildProcess] = set()
        self._idle: list[ChildProcess] = []
        self._closed = False
        try:
            first, answer = self._start()
        except BaseException:
            self.close()
            raise
        self.knows_tools = answer == "1"
        self._idle.append(first)

    def render(self, context: dict[str, Any]) -> str:
        """The text. Blocks, for `timeout` at most and, if need be, a process's start. Threads may call it at once."""
        # In pieces, as `json.dumps` does not: it would keep the interpreter, and with it the event loop, to itself.
        message = b"".join(map(to_bytes, _JSON.iterencode(context)))
        began = time.monotonic()
        with self._lock:
            process = self._idle.pop() if self._idle else None
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

    def close(self) -> None:
        """End every process. Renderings in progress fail, and so does whatever comes later."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            self._end(process)

    def _start(self) -> tuple[ChildProcess, str]:
        """A new process that has compiled the template, and what it said of it."""
        process = ChildProcess("protocol.template_child", _PACKAGES, self._timeout)
        with self._lock:
            self._processes.add(process)
        return process, self._ask(process, self._source, self._timeout, idle=False)

    def _ask(self, process: ChildProcess, message: bytes, seconds: float, *, idle: bool = True) -> str:
        """The answer. Afterwards the process is `idle`, or else its caller's, or has ended if it is of no more use."""
        usable = False
        try:
            if self._closed:
                raise RenderingFailed(Failure.GONE, "the server is shutting down")
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
                self._end(process)
            elif idle:
                with self._lock:
                    self._idle.append(process)

    def _end(self, process: ChildProcess) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)
