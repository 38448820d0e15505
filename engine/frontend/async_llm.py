"""The front end of servers. A request is a scope:

    async with llm.stream(request) as outputs:
        async for output in outputs:
            ...

Entering the block sends the request to the engine; leaving it, for any reason, ends the request there. Both are
synchronous puts, so leaving works inside a cancelled scope without a shield.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import overload

import anyio
import msgspec
from anyio.lowlevel import checkpoint
from tokenizers import Tokenizer

from engine import commands, messages
from engine.config import Clock
from engine.costs.table import StepCostTable
from engine.detokenizer import Vocabulary
from engine.errors import EngineDead, EngineNotReady, InvalidRequest
from engine.fairness import FairThreads
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_stream import Observer, RequestStream
from engine.snapshot import EngineSnapshot
from engine.structured.compile_queue import Owner
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.transport.channel import wait_done
from engine.transport.client import EngineClient

CHECKING_THREADS = 2  # for requests with long checks
INLINE_MICROSECONDS = 2000  # checks estimated longer run on a thread; under load, a hop to it takes as long
TOKENS_AT_ONCE = 65536  # prompt tokens put on the channel before other tasks run


class AsyncLLM:
    """Streams of an engine, on one event loop (asyncio or trio). Call all methods on that loop.

    `error` is the error that ended the engine, None while it lives. `ready` is set when the model is loaded.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        grammars: GrammarCompiler | None = None,
        observer: Observer | None = None,
        seed: int | None = None,
        clock: Clock = time.monotonic,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make a front end. Without `grammars`, requests for structured output are refused. Each delivery of the engine
        enters a new context from `together` once, and calls the streams' listeners inside it."""
        self.vocabulary = grammars.vocabulary if grammars is not None else Vocabulary(tokenizer)
        self.ready: messages.EngineReady | None = None
        self.error: BaseException | None = None
        self.last_stats: messages.SchedulerStats | None = None
        self.on_step_costs: Callable[[StepCostTable], None] = lambda table: None  # for reports of an engine
        self._client = client
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._checking = FairThreads(CHECKING_THREADS)
        self._seed = seed
        self._inputs: InputProcessor | None = None
        self._observer = observer or Observer()
        self._clock = clock
        self._together = together
        self._outputs = OutputProcessor(self.vocabulary, self._observer, clock)
        self._loaded = anyio.Event()  # set when the model is loaded, or loading has failed
        self._dead = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine while in this block. Streams that are open at the end of it get EngineDead."""
        async with self._client.running(self._receive):
            yield

    async def wait_ready(self) -> messages.EngineReady:
        """Wait until the model is loaded. Raises the error if loading failed."""
        await self._loaded.wait()
        if self.ready is None:
            assert self.error is not None
            raise self.error
        return self.ready

    async def wait_dead(self) -> BaseException:
        """Wait until the engine ends, and return the error that ended it."""
        await self._dead.wait()
        assert self.error is not None
        return self.error

    @asynccontextmanager
    async def stream(
        self, *requests: messages.EngineCoreRequest, begins_message: bool = False
    ) -> AsyncIterator[RequestStream]:
        """Generate `sampling.n` choices for each of these prompts, as one scope with one stream.

        Choices are numbered prompt by prompt. Cancelling or leaving the block aborts all unfinished choices. Nothing is
        sent until grammars are compiled and long requests are checked on a thread; a caller may leave before. For
        `begins_message` see `OutputProcessor.open`.

        Raises InvalidRequest before anything is sent, EngineNotReady while no engine is loaded, EngineDead when the
        engine has ended; iterating raises EngineDead if the engine ends.
        """
        requests, unenforced = await self._with_grammars(requests)
        choices = await self._check(requests)
        self._available_inputs()  # the engine may have ended in between
        children = list(itertools.chain.from_iterable(choices))
        stream = self._outputs.open(requests, children, begins_message=begins_message)
        stream.unenforced = unenforced
        stream.abort = self._abort
        try:
            await self._add(choices)
            yield stream
        finally:
            unfinished = self._outputs.close(stream)
            if unfinished:
                self._client.send(commands.FinishRequests(unfinished, stream.leave_reason))

    def _abort(self, stream: RequestStream) -> None:
        """End the unfinished choices of a stream with `FinishReason.ABORT`; its reader gets their text so far."""
        self._client.send(commands.FinishRequests(self._outputs.abort(stream), messages.FinishReason.ABORT))

    def send(self, command: commands.Command) -> None:
        """Send a command, which is carried out before all streams opened later."""
        self._client.send(command)

    @overload
    async def query(self, question: commands.GetSnapshot) -> dict[int, EngineSnapshot]: ...
    @overload
    async def query(self, question: commands.StartProfile | commands.StopProfile) -> dict[int, commands.Profile]: ...
    async def query(self, question: commands.Question) -> Mapping[int, commands.Answer]:
        """Return the answer of each live engine, as `EngineClient.query` does."""
        return await self._client.query(question)

    async def _with_grammars(
        self, requests: tuple[messages.EngineCoreRequest, ...]
    ) -> tuple[tuple[messages.EngineCoreRequest, ...], tuple[str, ...]]:
        """Return the requests with enforceable grammars, and the schema keywords that the first one ignores."""
        sampling = requests[0].sampling
        unenforced: tuple[str, ...] = ()
        changed: dict[int, messages.SamplingParams] = {}  # by `id` of the original object, which requests mostly share
        grammars: dict[messages.StructuredOutput, CompiledGrammar | None] = {}
        for request in requests:
            structured = request.sampling.structured_output
            if structured is None or id(request.sampling) in changed:
                continue
            if structured not in grammars:
                grammars[structured] = await self._grammar(structured, request)
            grammar = grammars[structured]
            if grammar is not None and grammar.enforced != structured:
                changed[id(request.sampling)] = msgspec.structs.replace(
                    request.sampling, structured_output=grammar.enforced
                )
                if request.sampling is sampling:
                    unenforced = grammar.unenforced
        if not changed:
            return requests, ()
        return tuple(
            msgspec.structs.replace(request, sampling=changed.get(id(request.sampling), request.sampling))
            for request in requests
        ), unenforced

    async def _grammar(
        self, structured: messages.StructuredOutput, request: messages.EngineCoreRequest
    ) -> CompiledGrammar | None:
        """Wait for a grammar and return it; None at the request's deadline. Raises InvalidRequest if it cannot be
        enforced. A cancelled caller leaves the compiler's queue."""
        if self._grammars is None:
            raise InvalidRequest(
                "structured_output is not supported: this engine has no grammar compiler. Leave it out.",
                param="structured_output",
            )
        future = self._grammars.submit(structured, Owner.of(request))
        if not future.done():
            deadlines = [each for each in (request.deadline, request.first_token_deadline) if each is not None]
            latest = min(deadlines, default=math.inf)
            try:
                # At the deadline the request goes on to the engine, which ends it.
                with anyio.move_on_after(latest - self._clock()):
                    await wait_done(future)
            finally:
                future.cancel()
        return None if future.cancelled() else future.result()

    async def _check(self, requests: tuple[messages.EngineCoreRequest, ...]) -> list[list[messages.EngineCoreRequest]]:
        """Return the choices of each of these prompts. Raises InvalidRequest."""
        inputs = self._available_inputs()
        if inputs.cost(requests) <= INLINE_MICROSECONDS:
            return inputs.process(requests)
        return await self._checking.run(lambda: inputs.process(requests))

    async def _add(self, choices: list[list[messages.EngineCoreRequest]]) -> None:
        """Put all choices on the channel. Other tasks run after every `TOKENS_AT_ONCE` tokens of prompts."""
        num_tokens = 0
        for children in choices:
            self._client.send(commands.AddRequests.of(children))
            num_tokens += len(children[0].prompt_token_ids)
            if num_tokens >= TOKENS_AT_ONCE:
                num_tokens = 0
                await checkpoint()

    def _available_inputs(self) -> InputProcessor:
        if self.error is not None:
            raise EngineDead("the engine has ended; restart the server") from self.error
        if self._inputs is None:
            raise EngineNotReady("the model is still being loaded")
        if not self._client.is_available:
            raise EngineNotReady("no engine is running at the moment; one is being started")
        return self._inputs

    @property
    def is_available(self) -> bool:
        """True if a stream can be opened now."""
        return self.error is None and self._inputs is not None and self._client.is_available

    @property
    def num_engines(self) -> int:
        """The number of engines that take requests; at least 1."""
        return getattr(self._client, "num_engines", 1)

    @property
    def num_blocks(self) -> int:
        """The KV blocks of all engines that run; 0 before the first runs."""
        at_first = 0 if self.ready is None else self.ready.num_blocks
        return getattr(self._client, "num_blocks", at_first)

    @property
    def routing(self) -> messages.RoutingStats | None:
        """The state of the routing among several engines; None for one engine."""
        return getattr(self._client, "routing", None)

    def seconds_without_progress(self) -> float:
        """Return for how long the engine has had work and made no step; 0 when it is idle.

        A step that does not end counts even if all its clients have left: the next requests would wait for it, too.
        """
        is_asleep = self._client.is_asleep  # read first: an engine that wakes up sets its heartbeat before this flag
        since = self._client.last_progress
        if is_asleep:  # it may not have received the commands in its inbox
            oldest = self._outputs.oldest_arrival()
            if oldest is None:
                return 0.0
            since = max(since, oldest)
        return max(0.0, self._clock() - since)

    @property
    def num_open_choices(self) -> int:
        return self._outputs.num_choices

    def _receive(self, events: list[commands.Event]) -> None:
        started = time.thread_time()
        for event in events:
            self._take(event)
        with self._together():
            failed = self._outputs.hand_over()
        if failed:
            self._client.send(commands.FinishRequests(failed, messages.FinishReason.ABORT))
        self._observer.on_delivery(time.thread_time() - started)

    def _take(self, event: commands.Event) -> None:
        if isinstance(event, messages.EngineCoreOutputs):
            self.last_stats = event.stats
            self._take_costs(event.stats.step_costs)
            stopped = self._outputs.process(event)
            if stopped:
                self._client.send(commands.FinishRequests(stopped, messages.FinishReason.STOP))
        elif isinstance(event, messages.EngineReady):
            self.ready = event
            self._inputs = InputProcessor(
                self._tokenizer, vocab_size=event.vocab_size, max_model_len=event.max_model_len, seed=self._seed
            )
            self._take_costs(event.step_costs)
            self._loaded.set()
        elif isinstance(event, commands.EngineDied):
            self.error = event.error
            dead = EngineDead("the engine has ended; restart the server")
            dead.__cause__ = event.error
            self._outputs.fail_all(dead)
            self._loaded.set()
            self._dead.set()

    def _take_costs(self, costs: bytes | None) -> None:
        if costs:
            self.on_step_costs(StepCostTable.from_json(costs))
