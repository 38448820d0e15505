"""One engine core that several threads use at once: their calls run together, as requests of one batch.

The core steps on threads of its own, never on a caller's. So an interrupt (Ctrl-C, or any signal handler that raises)
strikes only the thread that waits, never half-way through a plan or its accounts; the call's requests are then aborted
between two steps, as a server aborts those of a client that has gone.

A caller changes nothing that is shared. It puts its call on a queue, starts a thread that steps until nothing is left,
and waits for the call's news. Threads that are started while one steps wait for it and then find nothing to do, so no
call can be forgotten, whenever the thread before ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from engine.core.core import EngineCore
from engine.errors import EngineDead
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import RequestStream
from engine.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason

OnStep = Callable[[int, int], None]
"""Is told after each step how many prompts have finished, and how many tokens have been generated so far."""


class Call:
    """The requests of one caller, one stream for each. Its caller reads `streams` and `error` after the end."""

    def __init__(
        self,
        requests: Sequence[EngineCoreRequest],
        children: Sequence[Sequence[EngineCoreRequest]],
        *,
        is_watched: bool,
    ) -> None:
        """With `is_watched`, every step that runs meanwhile is news."""
        self.requests = requests
        self.children = children
        self.child_ids = {child.request_id for of_one in children for child in of_one}
        self.is_watched = is_watched
        self.streams: list[RequestStream] = []
        self.num_tokens = 0
        self.error: BaseException | None = None  # what the engine died of
        self.is_taken = False  # by the thread that steps
        self.is_left = False  # its caller wants nothing any more
        self.news: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # for an OnStep; None at the end

    @property
    def num_finished(self) -> int:
        """How many of its streams have come to their end."""
        return sum(not stream.num_unfinished or stream.error is not None for stream in self.streams)


class SharedEngine:
    """Owns `core` and `outputs` from here on. `run` and `close` may be called by any thread."""

    def __init__(self, core: EngineCore, outputs: OutputProcessor) -> None:
        self._core = core
        self._outputs = outputs
        self._process = os.getpid()
        self._arrived: SimpleQueue[Call] = SimpleQueue()
        self._stepping = threading.Lock()  # held by the thread that steps, and guards all below
        self._open: list[Call] = []
        self._ended: list[Call] = []  # whose callers do not know yet
        self._error: BaseException | None = None  # what the core died of, or that it was closed
        self._is_closing = self._is_shut_down = False
        self._stepper: int | None = None  # the thread that steps

    def check_process(self) -> None:
        """Raise EngineDead in a process that was forked from the one that loaded the model: no thread came along."""
        if os.getpid() != self._process:
            raise EngineDead(
                f"this LLM was loaded by process {self._process} and cannot be used in process {os.getpid()}, which "
                'was forked from it: load an LLM there, or start it with multiprocessing.get_context("spawn")'
            )

    def run(self, call: Call, on_step: OnStep | None = None) -> None:
        """Have the requests of a new call computed, and wait for their end.

        If this raises anything, an interrupt or an error of `on_step`, the requests have been aborted. Raises
        EngineDead if the engine has ended or ends meanwhile.
        """
        try:
            self._arrived.put(call)
            self._start()
            self._wait(call, on_step)
        except BaseException:
            call.is_left = True
            self._arrived.put(call)  # the interrupt may have come before all this was done
            self._start()
            self._wait(call, None)
            raise
        if call.error is not None:
            raise EngineDead("the engine has ended; load the model again") from call.error

    def close(self) -> None:
        """End all calls after the step that runs, and shut the core down. Nothing happens in a forked process."""
        if os.getpid() != self._process:
            return
        self._is_closing = True
        if self._stepper != threading.get_ident():  # a garbage collection may call this anywhere
            with self._stepping:
                self._shut_down()

    def _start(self) -> None:
        # A daemon, so that a process whose main thread was interrupted twice can end.
        threading.Thread(target=self._serve, name="headrace-llm", daemon=True).start()

    @staticmethod
    def _wait(call: Call, on_step: OnStep | None) -> None:
        while (news := call.news.get()) is not None:
            if on_step is not None:
                on_step(*news)

    # --- on the thread that steps

    def _serve(self) -> None:
        """Step until nothing is left to do."""
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                while self._take_in():
                    self._deliver(self._core.step(self._are_left))
                    if self._open:  # else they are told when the core is idle
                        self._tell_ended()
            except BaseException as error:
                self._error = error
            for call in list(self._open):
                call.error = self._error or EngineDead("the LLM was closed while it generated")
                self._open.remove(call)
                self._ended.append(call)
            self._tell_ended()
            self._stepper = None
            if self._is_closing:
                self._shut_down()

    def _shut_down(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._core.shutdown()

    def _take_in(self) -> bool:
        """Take in what callers want. Returns whether there is anything to compute."""
        while True:
            try:
                call = self._arrived.get_nowait()
            except Empty:
                break
            if not call.is_taken:
                call.is_taken = True
                self._begin(call)
            elif call not in self._open:  # its caller was interrupted, perhaps with the end in its hands
                self._ended.append(call)
        for call in [call for call in self._open if call.is_left]:
            self._end(call)
        return self._error is None and not self._is_closing and self._core.has_work

    def _begin(self, call: Call) -> None:
        self._open.append(call)
        if self._error is None and not call.is_left:
            for request, children in zip(call.requests, call.children, strict=True):
                call.streams.append(self._outputs.open([request], children))
                for child in children:
                    self._core.add(child)
        if not call.child_ids:
            self._end(call)

    def _end(self, call: Call) -> None:
        self._open.remove(call)
        for stream in call.streams:
            for child_id in self._outputs.close(stream):
                self._core.finish_request(child_id, FinishReason.ABORT)
        self._ended.append(call)

    def _tell_ended(self) -> None:
        for call in self._ended:
            call.news.put(None)
        self._ended = []

    def _are_left(self, request_ids: Sequence[str]) -> bool:
        """Whether the callers of all these requests have gone. Asked many times within a step."""
        left = [call.child_ids for call in self._open if call.is_left]
        return bool(left and request_ids) and set().union(*left).issuperset(request_ids)

    def _deliver(self, batch: EngineCoreOutputs) -> None:
        for child_id in self._outputs.process(batch):
            self._core.finish_request(child_id, FinishReason.STOP)
        for child_id in self._outputs.hand_over():
            self._core.finish_request(child_id, FinishReason.ABORT)
        for call in list(self._open):
            call.num_tokens += sum(
                len(output.new_token_ids) for output in batch.outputs if output.request_id in call.child_ids
            )
            num_finished = call.num_finished
            if call.is_watched:
                call.news.put((num_finished, call.num_tokens))
            if num_finished == len(call.streams):
                self._end(call)
