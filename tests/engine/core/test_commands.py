"""The alphabet of the channel: every word crosses a process whole, is carried out, and does no harm out of turn."""

from __future__ import annotations

import ast
import inspect
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from types import ModuleType, UnionType
from typing import Any, get_args

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.transport.channel
import engine.transport.process_client
import engine.transport.process_core
import engine.transport.wire
from engine.commands import (
    AddRequests,
    Answer,
    Answered,
    Ask,
    Break,
    ChargeTenants,
    Close,
    Command,
    EngineDied,
    Event,
    FinishRequests,
    GetSnapshot,
    LoadingProgress,
    Profile,
    PublishKVEvents,
    Question,
    RequestsBegun,
    ResetPrefixCache,
    SetLogLevel,
    StartProfile,
    StopProfile,
)
from engine.costs.table import StepBudget
from engine.errors import ConfigError
from engine.kv_events import KVEvents
from engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EventKind,
    FinishReason,
    RequestEvent,
    SchedulerStats,
    TokenLogprobs,
)
from engine.snapshot import EngineSnapshot
from engine.transport.client import EngineClient
from engine.transport.wire import decoder, encoder
from tests.engine.helpers import assert_nothing_left, make_core, make_request, until
from tests.engine.processes import Where, client
from tests.engine.serving import MAX_MODEL_LEN, VOCAB_SIZE
from tests.engine.simulated_tokens import expected_output


def members(union: Any) -> set[type[msgspec.Struct]]:
    return set(get_args(union)) if isinstance(union, UnionType) else {union}


def children(prompt: Sequence[int], *request_ids: str, **sampling: Any) -> AddRequests:
    request = make_request(prompt, **sampling)
    return AddRequests.of([msgspec.structs.replace(request, request_id=each) for each in request_ids])


def snapshot() -> EngineSnapshot:
    """Of an engine that has every kind of thing to show."""
    core = make_core(num_blocks=40, max_num_seqs=2)
    core.carry_out(children(range(30), "a", "b", "c", "d", max_tokens=20))
    for _ in range(5):
        core.step()
    taken = core.snapshot()
    assert taken.running
    assert taken.waiting
    assert taken.steps
    assert taken.blocks.by_ref_count.keys() == {1, 2}
    return taken


EXAMPLES: list[Any] = [
    children(range(9), "a", "b", seed=3, logprobs=2, stop=("x",)),
    FinishRequests(["a", "b"], FinishReason.STOP),
    ResetPrefixCache(),
    SetLogLevel("debug"),
    ChargeTenants({"a": 1.5}),
    PublishKVEvents(b"key"),
    Ask(7, GetSnapshot()),
    Close(),
    GetSnapshot(),
    StartProfile(12),
    StopProfile(),
    snapshot(),
    Profile(b"[{}]", 12),
    Profile(num_steps=12, is_too_large=True),
    LoadingProgress("Loading", 1, None),
    RequestsBegun(["a", "b"]),
    EngineReady(vocab_size=9, num_blocks=8, block_size=4, max_model_len=32),
    EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(request_id="a", new_token_ids=[1, 2], logprobs=[TokenLogprobs(1, -0.5, 1, [(1, -0.5)])]),
            EngineCoreOutput(
                request_id="b",
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                error="why",
                events=[RequestEvent(EventKind.PREFILL, 1.5, 9)],
                embedding=b"\x00\x01",
            ),
        ],
        stats=SchedulerStats(
            step=1,
            num_running=2,
            num_waiting=3,
            kv_cache_usage=0.5,
            num_preemptions=4,
            prompt_tokens=5,
            prefix_cache_queries=6,
            prefix_cache_hits=7,
        ),
        timestamp=2.5,
        kv_events=KVEvents(epoch=2**62, sequence=3, stored=b"12345678", removed=b""),
    ),
    Answered(7, snapshot()),
    Answered(8, None, "why"),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_word_crosses_a_process_whole(example: Any) -> None:
    for union in (Command, Event, Question, Answer):
        if type(example) in members(union):
            assert decoder(union).decode(encoder().encode(example)) == example


def test_no_word_is_forgotten() -> None:
    tried = {type(example) for example in EXAMPLES} | {
        Break,
        EngineDied,
    }  # which is tried below: errors equal only themselves
    assert tried == members(Command) | members(Event) | members(Question) | members(Answer)
    for word in members(Command) | members(Event) | members(Question):
        assert word.__struct_config__.array_like
        assert word.__struct_config__.tag == word.__name__


def test_what_an_engine_has_died_of_crosses_in_words() -> None:
    died = EngineDied(ConfigError("dtype", "int3", allowed="it must be auto", hint="dtype=auto works"))
    error = decoder(Event).decode(encoder().encode(died)).error
    assert (type(error), str(error)) == (ConfigError, str(died.error))


def test_every_command_is_carried_out_and_every_question_answered() -> None:
    assert make_core()._handlers.keys() == members(Command) | members(Question)


@pytest.mark.parametrize(
    "way",
    [
        engine.transport.channel,
        engine.transport.process_client.EngineProcess,
        engine.transport.process_core,
        engine.transport.wire,
    ],
    ids=lambda way: way.__name__,
)
def test_nothing_on_the_way_knows_a_command_by_its_name(way: ModuleType | type) -> None:
    names = {node.id for node in ast.walk(ast.parse(inspect.getsource(way))) if isinstance(node, ast.Name)}
    assert not names & {word.__name__ for word in members(Command) | members(Question) | members(Answer)}


# --- in any order

NAMES = [f"r{number}" for number in range(6)]
PROMPTS = {name: [index % 3, *range(4 + 5 * index)] for index, name in enumerate(NAMES)}
Word = tuple[Any, ...]
STEP = ("step",)


def command_of(word: Word) -> Command:
    match word:
        case ("add", name):
            return children(PROMPTS[name], f"{name}-0", f"{name}-1", max_tokens=12)
        case ("finish", who):
            return FinishRequests([f"{name}-{index}" for name in who for index in (0, 1)], FinishReason.ABORT)
        case ("reset",):
            return ResetPrefixCache()
        case _:
            return Ask(1, GetSnapshot())


def assert_untouched_get_everything(words: Iterable[Word], steps: Iterable[EngineCoreOutputs], vocab_size: int) -> None:
    """Who was never ended from outside gives just what its prompt determines, each time that it has run."""
    tokens: dict[str, list[int]] = {}
    num_ends: Counter[str] = Counter()
    for output in chain.from_iterable(step.outputs for step in steps):
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        num_ends[output.request_id] += output.finish_reason is not None
    added = {word[1] for word in words if word[0] == "add"}
    for name in added - {name for word in words if word[0] == "finish" for name in word[1]}:
        sampling = make_request([], max_tokens=12).sampling
        expected = expected_output(PROMPTS[name], sampling, vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN)
        for request_id in (f"{name}-0", f"{name}-1"):
            assert num_ends[request_id] >= 1
            assert tokens[request_id] == expected.token_ids * num_ends[request_id]


async def look_at(engine: EngineClient) -> EngineSnapshot:
    (answer,) = (await engine.query(GetSnapshot())).values()
    assert isinstance(answer, EngineSnapshot)
    return answer


def without_times(event: Event | None) -> Event | None:
    if not isinstance(event, Answered) or not isinstance(event.answer, EngineSnapshot):
        return event
    steps = tuple(msgspec.structs.replace(step, time=0.0, seconds=0.0) for step in event.answer.steps)
    return Answered(
        event.number, msgspec.structs.replace(event.answer, time=0.0, seconds=0.0, oldest_wait=None, steps=steps)
    )


names = st.sampled_from(NAMES)


@given(
    words=st.lists(
        st.one_of(
            st.tuples(st.just("add"), names),
            st.tuples(st.just("finish"), st.lists(names, max_size=2)),
            st.sampled_from([("reset",), ("ask",), STEP, STEP, STEP]),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_commands_in_any_order_do_the_same_as_msgpack_and_leave_nothing_behind(words: list[Word]) -> None:
    """Also those that overtake, repeat and come late."""
    here, there = cores = [make_core(max_num_seqs=4, num_blocks=40) for _ in range(2)]
    encode, decode = encoder().encode, decoder(Command).decode
    for core in cores:
        core.scheduler.pacing = StepBudget(core.costs, 32, 1e9)  # so that nothing depends on the clock
    steps: list[EngineCoreOutputs] = []
    for word in [*words, *[STEP] * 400]:
        if word != STEP:
            told = here.carry_out(command_of(word)), there.carry_out(decode(encode(command_of(word))))
            assert without_times(told[0]) == without_times(told[1])
            if word[0] == "finish":
                assert here.scheduler.requests.keys().isdisjoint(command_of(word).ends)
        elif here.has_work or there.has_work:
            made = [core.step() for core in cores]
            for step in made:
                for output in step.outputs:
                    output.events = None  # they have times
            assert made[0].outputs == made[1].outputs
            steps.append(made[0])
            here.scheduler.check_integrity()
    for core in cores:
        assert_nothing_left(core)
    assert_untouched_get_everything(words, steps, vocab_size=1000)


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["thread", "process"])
async def test_commands_in_any_order_leave_the_same_wherever_the_engine_runs(where: Where) -> None:
    chance = random.Random(5)
    received: list[Event] = []
    running = client(where, max_num_seqs=4, num_blocks=40)
    async with running.running(received.extend):
        await until(lambda: received)
        for _ in range(8):
            adds = [("add", name) for name in NAMES] * 2
            ends = [("finish", chance.sample(NAMES[2:], 2)) for _ in range(4)]
            words: list[Word] = [*adds, *ends, *ends, ("reset",), ("reset",)]
            chance.shuffle(words)
            start = len(received)
            for word in words:
                running.send(command_of(word))
                if chance.random() < 0.1:
                    await anyio.sleep(0.001)
            while (left := await look_at(running)).running or left.waiting:
                pass
            running.send(ResetPrefixCache())
            left = await look_at(running)
            assert (left.blocks.num_owned, left.blocks.num_cached, left.blocks.num_free) == (0, 0, 40)
            assert not left.blocks.by_ref_count
            steps = [event for event in received[start:] if isinstance(event, EngineCoreOutputs)]
            assert_untouched_get_everything(words, steps, VOCAB_SIZE)
    assert isinstance(received[0], EngineReady)
    assert isinstance(received[-1], EngineDied)
    assert {type(event) for event in received[1:-1]} - {RequestsBegun} == {EngineCoreOutputs}
