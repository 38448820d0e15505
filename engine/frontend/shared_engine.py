"""One engine core that several threads use at once: their calls run together, as requests of one batch.

The core steps on threads of its own, never on a caller's. So an interrupt (Ctrl-C, or any signal handler that raises)
only reaches the waiting caller and never interrupts a step. The caller's requests are then aborted between two steps,
like those of a client that has disconnected from a server.

A caller changes no shared state. It puts its call on a queue, starts a thread that steps until no work is left, and
waits for the outputs. A thread that is started while another one steps waits until that one ends, and usually finds no
work left. So a call is run even if it is queued just as the stepping thread ends. At most one thread waits, and it runs
the calls of all later callers too, so threads do not pile up.
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
"""Called after each step with the number of finished prompts and the number of tokens generated so far."""


class Call:
    """The requests of one `generate`, with a stream for each. The caller reads `streams` and `error` at the end."""

    def __init__(
        self,
        requests: Sequence[EngineCoreRequest],
        children: Sequence[Sequence[EngineCoreRequest]],
        *,
        is_watched: bool,
        begins_message: bool = False,
    ) -> None:
        """Hold the requests of one call. If `is_watched` is set, the call gets news after every step. For
        `begins_message` see `OutputProcessor.open`."""
        self.requests = requests
        self.children = children
        self.child_ids = {child.request_id for of_one in children for child in of_one}
        self.is_watched = is_watched
        self.begins_message = begins_message
        self.streams: list[RequestStream] = []
        self.num_tokens = 0
        self.error: BaseException | None = None  # why the engine died
        self.is_taken = False  # by the thread that steps
        self.is_left = False  # its caller has stopped waiting
        self.news: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # for an OnStep; None at the end

    @property
    def num_finished(self) -> int:
        return sum(not stream.num_unfinished or stream.error is not None for stream in self.streams)


class SharedEngine:
    """The owner of `core` and `outputs`. Any thread may call `run` and `close`."""

    def __init__(self, core: EngineCore, outputs: OutputProcessor) -> None:
        self._core = core
        self._outputs = outputs
        self._process = os.getpid()
        self._arrived: SimpleQueue[Call] = SimpleQueue()
        self._waiting = threading.Lock()  # held by the thread that waits to step
        self._stepping = threading.Lock()  # held by the thread that steps; guards all attributes below
        self._open: list[Call] = []
        self._ended: list[Call] = []  # calls that have ended, but have not got their last news
        self._error: BaseException | None = None  # why the core died
        self._is_closing = self._is_shut_down = False
        self._stepper: int | None = None  # the thread that steps

    def check_process(self) -> None:
        """Raise EngineDead in a fork of the process that loaded the model: a fork has none of its threads."""
        if os.getpid() != self._process:
            raise EngineDead(
                f"this LLM was loaded by process {self._process} and cannot be used in process {os.getpid()}, which "
                'was forked from it: load an LLM there, or start it with multiprocessing.get_context("spawn")'
            )

    def run(self, call: Call, on_step: OnStep | None = None) -> None:
        """Run the requests of a new call, and wait for their end.

        If this raises anything, an interrupt or an error of `on_step`, the requests have been aborted. Raises
        EngineDead if the engine has ended or ends before the call's end.
        """
        try:
            self._arrived.put(call)
            self._start()
            self._wait(call, on_step)
        except BaseException:
            call.is_left = True
            self._arrived.put(call)  # the interrupt may have come before the call was queued or a thread started
            self._start()
            self._wait(call, None)
            raise
        if call.error is not None:
            raise EngineDead("the engine has ended; load the model again") from call.error

    def close(self) -> None:
        """End all calls after the current step, and shut the core down. Does nothing in a forked process."""
        if os.getpid() != self._process:
            return
        self._is_closing = True
        if self._stepper != threading.get_ident():  # a garbage collection may call this anywhere
            with self._stepping:
                self._shut_down()

    def _start(self) -> None:
        # A daemon thread does not keep the process alive after its main thread was interrupted twice.
        threading.Thread(target=self._serve, name="headrace-llm", daemon=True).start()

    @staticmethod
    def _wait(call: Call, on_step: OnStep | None) -> None:
        while (news := call.news.get()) is not None:
            if on_step is not None:
                on_step(*news)

    # --- on the thread that steps

    def _serve(self) -> None:
        """Step until no work is left. Return at once if another thread already waits to do so."""
        if not self._waiting.acquire(blocking=False):
            return
        with self._stepping:
            self._waiting.release()
            self._stepper = threading.get_ident()
            try:
                while self._take_in():
                    self._deliver(self._core.step(self._are_left))
                    if self._open:  # if no call is open, they get their last news after the loop
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
        """Begin new calls and end abandoned ones. Return True if there is work for the core."""
        while True:
            try:
                call = self._arrived.get_nowait()
            except Empty:
                break
            if not call.is_taken:
                call.is_taken = True
                self._begin(call)
            elif call not in self._open:  # its caller was interrupted, perhaps after it got its last news
                self._ended.append(call)
        for call in [call for call in self._open if call.is_left]:
            self._end(call)
        return self._error is None and not self._is_closing and self._core.has_work

    def _begin(self, call: Call) -> None:
        self._open.append(call)
        if self._error is None and not call.is_left:
            for request, children in zip(call.requests, call.children, strict=True):
                stream = self._outputs.open([request], children, begins_message=call.begins_message)
                call.streams.append(stream)
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
        """Return True if the callers of all these requests have stopped waiting. Called many times within a step."""
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
