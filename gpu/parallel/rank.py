"""One rank: its part of the model, and the execution of its driver's messages, whatever transport delivers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from engine.errors import ErrorInWords
from engine.executor import STEPS_BETWEEN_EXPERT_LOADS, StepHandle
from engine.plan import TokenMasks
from gpu.executor import device_name
from gpu.kv_cache import KVCacheSize
from gpu.parallel import messages
from gpu.parallel.links import StageLink
from gpu.runner.host_runner import ModelRunner
from gpu.runner.runner import FinishedStep
from gpu.sharding import Layout
from gpu.worker import Worker

if TYPE_CHECKING:
    from gpu.profile import WorkerProfile


AbortChecks = Callable[[int], Callable[[], bool] | None]
"""Makes the abort check of a step, given its number; None if another rank checks."""


class Inbox(Protocol):
    """The driver's messages, in order."""

    @property
    def has_message(self) -> bool: ...

    def read(self) -> bytes:
        """Wait for the next message, and return it."""
        ...

    def count_step(self) -> None:
        """Count a finished step, for the driver."""
        ...


class Rank:
    """Executes its driver's messages. `send` sends to the driver. `link` is needed if there are several stages."""

    def __init__(
        self, layout: Layout, inbox: Inbox, send: Callable[[messages.Up], None], link: StageLink | None = None
    ) -> None:
        self._layout = layout
        self.link = link
        self._unsampled: deque[int] = deque()  # steps that ran here and wait for the last stage's tokens
        self._inbox = inbox
        self._send = send
        self._decode = messages.down_decoder(lambda: _MasksToCome(self))
        self._waiting: deque[messages.Down] = deque()  # read while a step waited for its masks
        self._in_flight: deque[tuple[int, StepHandle]] = deque()
        self._profile: WorkerProfile | None = None
        self._step = 0

    def agree(self, size: KVCacheSize) -> KVCacheSize:
        """Return a KV cache that all ranks can have, with sizes in bytes summed over the ranks."""
        own = {name: getattr(size, name) for name in messages.CacheSize.__struct_fields__}
        self._send(messages.CacheSize(**own))
        agreed = self._next()
        assert isinstance(agreed, messages.CacheSize)
        return replace(
            size,
            **structs.asdict(agreed),
            num_tokens=size.num_tokens // size.block_size * agreed.num_blocks // size.num_blocks * size.block_size,
        )

    def serve(self, worker: Worker, cost: str, vocab_size: int, abort_checks: AbortChecks) -> None:
        """Send `Loaded`, then execute the driver's messages until the process ends."""
        size = worker.kv_cache_size
        self._send(
            messages.Loaded(
                num_blocks=size.num_blocks,
                block_size=size.block_size,
                vocab_size=vocab_size,
                max_model_len=size.max_model_len,
                pipeline_depth=worker.pipeline_depth,
                facts=worker.facts,
                computes=worker.computes,
                device_name=device_name(worker.device),
                kv_cache=f"{size}{cost}",
            )
        )
        while True:
            has_message = bool(self._waiting) or self._inbox.has_message
            if self._in_flight and (not has_message or len(self._in_flight) == worker.pipeline_depth):
                self._finish(worker)
                continue
            match self._waiting.popleft() if self._waiting else self._next():
                case messages.Step() as step:
                    self._submit(worker, step, abort_checks)
                case messages.Call(name):
                    while self._in_flight:
                        self._finish(worker)
                    self._send(self._call(worker, name))
                case messages.Masks():  # the masks of a step that failed before it read them
                    pass
                case messages.CacheSize():
                    raise ValueError("the size of the KV cache has been agreed upon")

    def masks(self) -> TokenMasks:
        """Wait for the masks of the running step. Other messages wait until it is over."""
        while True:
            message = self._next()
            if isinstance(message, messages.Masks):
                if message.step == self._step:
                    return message.masks()
            else:
                self._waiting.append(message)

    def _next(self) -> messages.Down:
        return self._decode(self._inbox.read())

    def _submit(self, worker: Worker, step: messages.Step, abort_checks: AbortChecks) -> None:
        self._step = step.number
        if not self._layout.is_last_stage:
            self._record(worker, step)
        if self.link is not None:
            self.link.begin(step.number)
        handle: StepHandle
        try:
            handle = worker.runner.submit(step.plan, abort_checks(self._step))
        except Exception as error:
            handle = FinishedStep(error)
            if self.link is not None and step.plan.request_ids:
                self.link.fail(error)
        else:
            if step.plan.request_ids and not self._layout.is_last_stage:
                self._unsampled.append(step.number)
        self._in_flight.append((self._step, handle))

    def _record(self, worker: Worker, step: messages.Step) -> None:
        """Record the tokens that the last stage sampled in earlier steps."""
        assert isinstance(worker.runner, ModelRunner)
        for number, sampled in sorted(step.sampled.items()):
            if self._unsampled and self._unsampled[0] == number:
                self._unsampled.popleft()
                worker.runner.record(sampled)

    def _finish(self, worker: Worker) -> None:
        step, handle = self._in_flight.popleft()
        if step % STEPS_BETWEEN_EXPERT_LOADS == 0 and self._layout.tp_rank == 0:
            self._send(messages.ExpertTokens(worker.tokens_of_experts()))
        try:
            output = handle.result()
            if self._layout.is_last_stage and self._layout.tp_rank == 0:
                self._send(messages.Output(step, output))
        except Exception as error:
            self._send(messages.Failed(step, ErrorInWords.of(error)))
        self._inbox.count_step()

    def _call(self, worker: Worker, name: str) -> messages.Answer:
        try:
            if name == "prepare":
                return messages.Answer(worker.runner.prepare())
            if name == "start_profile":
                self._profile = worker.start_profile()
            elif name == "stop_profile" and self._profile is not None:
                profile, self._profile = self._profile, None
                return messages.Answer(profile.stop())
        except Exception as error:
            return messages.Answer(error=ErrorInWords.of(error))
        return messages.Answer()


class _MasksToCome:
    """A `MasksHandle` of masks that follow their step's message."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def result(self) -> TokenMasks:
        return self._rank.masks()
