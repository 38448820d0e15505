"""The queue of grammars to compile. Clients determine their number and size, and cancel some of them.

1. Tenants with queued grammars get one compilation each in turn, first in, first out within a tenant.
2. As soon as a second tenant has appeared, each tenant gets at most one thread, even if the other thread is idle: a
   compilation cannot be interrupted, so the next tenant would have to wait for it.
3. One thread never takes a large text, because the time mostly grows with the text. So even if all clients are one
   tenant, as without API keys, a small grammar waits for small ones only. Large grammars do not starve: if none is
   being compiled, the next free thread takes one.
4. A compilation is dropped when all its callers have left, if it has not begun. If it has, it keeps its thread to its
   end and counts as its tenant's turn.
5. Callers with the same owner and grammar share one compilation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from engine.fairness import RoundRobin
from engine.messages import EngineCoreRequest, StructuredOutput

COMPILER_THREADS = 2
# A text up to this size is small. At some microseconds per character it takes tens of milliseconds.
SMALL_CHARACTERS = 8 * 1024
# The stack of each thread. Only the used part becomes memory, and a thread ends when nothing is queued.
STACK_BYTES = 256 * 2**20

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The owner of a compiled grammar. Owners do not share grammars, as they do not share cached prefixes."""

    tenant: str = ""
    salt: str = ""

    @classmethod
    def of(cls, request: EngineCoreRequest) -> Owner:
        return cls(request.tenant, request.cache_salt)


Key = tuple[Owner, StructuredOutput]


class _Job(Generic[T]):
    """One compilation and the futures that wait for it."""

    __slots__ = ("has_begun", "is_large", "key", "waiting")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.is_large = key[1].size > SMALL_CHARACTERS
        self.waiting: set[Future[T]] = set()
        self.has_begun = False


class CompileQueue(Generic[T]):
    """Runs `work` on at most `COMPILER_THREADS` threads with a deep stack. Thread-safe."""

    def __init__(self, work: Callable[[Owner, StructuredOutput], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._jobs: dict[Key, _Job[T]] = {}  # queued, and being compiled
        self._small: RoundRobin[_Job[T]] = RoundRobin()
        self._large: RoundRobin[_Job[T]] = RoundRobin()
        self._num_threads = 0
        self._large_is_running = False
        self._running: list[str] = []  # tenants of the jobs that have begun
        self._first_tenant: str | None = None
        self._is_shared = False  # a second tenant has appeared

    def __len__(self) -> int:
        """Return the number of compilations that have not begun."""
        return len(self._small) + len(self._large)

    def submit(self, owner: Owner, structured: StructuredOutput) -> Future[T]:
        """Queue a compilation. Does not block. Cancel the future to leave the queue."""
        future: Future[T] = Future()
        key = owner, structured
        with self._lock:
            if self._first_tenant is None:
                self._first_tenant = owner.tenant
            self._is_shared = self._is_shared or owner.tenant != self._first_tenant
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(key)
                self._line_of(job).push(owner.tenant, job)
                try:
                    self._start_thread()
                except Exception:
                    self._drop(job)
                    raise
            job.waiting.add(future)
        future.add_done_callback(partial(self._leave, job))
        return future

    def _start_thread(self) -> None:
        if self._num_threads == COMPILER_THREADS:
            return
        try:
            _start_with_deep_stack(self._run)
        except Exception:  # no memory for a stack, or too many threads
            if not self._num_threads:  # else a running thread will take the job
                raise
        else:
            self._num_threads += 1

    def _line_of(self, job: _Job[T]) -> RoundRobin[_Job[T]]:
        return self._large if job.is_large else self._small

    def _leave(self, job: _Job[T], future: Future[T]) -> None:
        if future.cancelled():
            with self._lock:
                job.waiting.discard(future)
                if not job.waiting:
                    self._drop(job)

    def _drop(self, job: _Job[T]) -> None:
        if self._line_of(job).discard(job.key[0].tenant, job):
            del self._jobs[job.key]

    def _run(self) -> None:
        """Compile one grammar after the other, until there is none that this thread may take."""
        while (job := self._next()) is not None:
            result: T | None = None
            error: Exception | None = None
            try:
                result = self._work(*job.key)
            except Exception as exc:
                error = exc
            except BaseException as exc:  # a panic of the native library, which would end this thread
                error = RuntimeError(f"the grammar compiler failed ({type(exc).__name__})")
            for future in self._end(job):
                if future.set_running_or_notify_cancel():
                    if error is None:
                        future.set_result(result)  # type: ignore[arg-type]
                    else:
                        future.set_exception(error)

    def _next(self) -> _Job[T] | None:
        try:
            return self._begin()
        except BaseException as error:
            logger.exception("A grammar compiler thread failed: queued grammars fail, later ones get a new thread")
            for future in self._give_up():
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError(f"the grammar compiler failed ({type(error).__name__})"))
            return None

    def _give_up(self) -> set[Future[T]]:
        """Remove a failed thread, and all jobs that have not begun, because some may be missing from the queues.

        Returns the futures that wait for these jobs. The next job finds a consistent queue, and starts a thread.
        """
        with self._lock:
            lost = [job for job in self._jobs.values() if not job.has_begun]
            self._jobs = {job.key: job for job in self._jobs.values() if job.has_begun}
            self._small, self._large = RoundRobin(), RoundRobin()
            self._running = [job.key[0].tenant for job in self._jobs.values()]
            self._large_is_running = any(job.is_large for job in self._jobs.values())
            self._num_threads -= 1
            return set().union(*(job.waiting for job in lost))

    def _begin(self) -> _Job[T] | None:
        with self._lock:
            busy = self._running if self._is_shared else ()
            job = None if self._large_is_running else self._large.pop(busy)
            if job is None:
                job = self._small.pop(busy)
            if job is None:
                self._num_threads -= 1
                return None
            self._large_is_running = self._large_is_running or job.is_large
            self._running.append(job.key[0].tenant)
            if len(self):  # a thread that finds no job to take has ended
                self._start_thread()
            job.has_begun = True
            return job

    def _end(self, job: _Job[T]) -> set[Future[T]]:
        with self._lock:
            del self._jobs[job.key]
            self._running.remove(job.key[0].tenant)
            if job.is_large:
                self._large_is_running = False
            return set(job.waiting)


_stack_size_lock = threading.Lock()


def _start_with_deep_stack(function: Callable[[], None]) -> None:
    with _stack_size_lock:  # the stack size is a setting of the whole process
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=function, name="grammar-compiler").start()
        finally:
            threading.stack_size(before)
