"""A step may give a request any number of tokens, and nobody can tell from what they get.

`test_scheduler_properties` drives such steps through preemptions, failures and departures; here a front end reads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.frontend.output_processor import OutputProcessor
from engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    StructuredOutput,
    StructuredOutputKind,
    TokenLogprobs,
)
from engine.plan import ModelRunnerOutput
from engine.structured.compiler import GrammarCompiler
from engine.structured.matchers import TokenMatcher
from tests.engine.helpers import (
    RecordingObserver,
    assert_nothing_left,
    byte_level_tokenizer,
    make_core,
    make_request,
    make_scheduler,
    run_to_end,
    simulated,
    tokens_of,
)
from tests.engine.queueing_executor import QueueingExecutor
from tests.engine.simulated_tokens import expected_output

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
MAX_MODEL_LEN = 96
EOS = (258, 3, 77)
COMPILER = GrammarCompiler(VOCABULARY, vocab_size=VOCAB_SIZE, eos_token_ids=EOS[:1])
GRAMMAR = StructuredOutput(kind=StructuredOutputKind.REGEX, value="[a-d]{2,9}x")
MOST = 5  # tokens of one request in one step


class Answer(NamedTuple):
    """What a client gets. How much of the prompt was cached is not in it: that depends on who came when."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_tokens: int
    output_tokens: int


def draw_requests(draw: random.Random) -> list[EngineCoreRequest]:
    requests = []
    for number in range(draw.randint(1, 6)):
        prompt = [draw.randrange(3)] * draw.randint(1, 50)
        max_tokens = draw.randint(1, MAX_MODEL_LEN - len(prompt))
        options: dict[str, Any] = {
            "seed": draw.randrange(100),
            "temperature": draw.choice([0.0, 1.0]),
            "max_tokens": draw.choice([None, max_tokens, max_tokens]),
            "min_tokens": draw.choice([0, draw.randint(0, max_tokens)]),
            "ignore_eos": draw.random() < 0.5,
            "stop_token_ids": draw.choice([(), (9, 20, 31)]),
            "logprobs": draw.choice([None, 1]),
            "include_stop_str_in_output": draw.random() < 0.3,
        }
        if draw.random() < 0.2:
            options["structured_output"] = GRAMMAR
        else:
            # Strings that the answer has in it, which end somewhere within a step's tokens.
            text = TOKENIZER.decode(expected(make_request(prompt, **options)), skip_special_tokens=True)
            start = draw.randrange(len(text) + 1)
            found = text[start : start + draw.randint(1, 5)]
            options["stop"] = draw.choice([(), (found,)]) if found else ()
        requests.append(make_request(prompt, f"r{number}", **options))
    return requests


def expected(request: EngineCoreRequest) -> list[int]:
    return expected_output(
        request.prompt_token_ids,
        request.sampling,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=EOS,
    ).token_ids


def answers(
    requests: list[EngineCoreRequest], depth: int, most: int, how_many: Callable[[int], int] | None, seed: int = 0
) -> dict[str, Answer]:
    """What everybody gets from an engine that lacks blocks now and then."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        max_sampled_tokens=most,
        eos_token_ids=EOS,
        pipeline_depth=depth,
    )
    executor = QueueingExecutor(
        40, 4, VOCAB_SIZE, max_num_seqs=4, max_num_batched_tokens=40, fast=0.5, seed=seed, how_many=how_many
    )
    core = EngineCore(config, executor, COMPILER)
    observer = RecordingObserver()
    outputs = OutputProcessor(VOCABULARY, observer)
    waiting = list(requests)
    streams = {request.request_id: outputs.open([request], [request]) for request in requests}
    while waiting or core.has_work:
        if waiting and core.num_steps % 3 == 0:
            core.add(waiting.pop())
        for request_id in outputs.process(core.step()):
            core.finish_request(request_id, FinishReason.STOP)
        outputs.hand_over()
        core.scheduler.check_integrity()
        assert core.num_steps < 5000
    assert_nothing_left(core)
    found = {}
    for request_id, stream in streams.items():
        (output,) = stream.drain()
        assert outputs.close(stream) == []
        usage = observer.finished[-1]
        assert usage.reason is output.finish_reason
        assert usage.output_tokens == output.num_output_tokens
        found[request_id] = Answer(
            output.text,
            output.token_ids,
            output.logprobs,
            output.finish_reason,
            output.stop_reason,
            usage.prompt_tokens,
            usage.output_tokens,
        )
    assert observer.generated_tokens == sum(answer.output_tokens for answer in found.values())
    assert observer.generated_tokens == observer.num_first_tokens + observer.num_inter_tokens
    core.shutdown()  # which ends the threads that fill masks; the compiler is shared
    return found


@pytest.mark.slow
@pytest.mark.seconds
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), depth=st.sampled_from([1, 2]))
def test_any_number_of_tokens_a_step_gives_the_answers_that_one_a_step_gives(seed: int, depth: int) -> None:
    requests = draw_requests(random.Random(seed))
    one_by_one = answers(requests, 1, 1, None)
    for how_many in (None, partial(random.Random(seed).randint, 0)):
        assert answers(requests, depth, MOST, how_many, seed) == one_by_one


@pytest.mark.parametrize("depth", [1, 2])
def test_all_that_a_step_may_give_saves_steps(depth: int) -> None:
    core = make_core(pipeline_depth=depth, max_sampled_tokens=MOST)
    request = make_request(range(9), max_tokens=41, ignore_eos=True)
    core.add(request)
    outputs = run_to_end(core)[request.request_id]
    assert [len(output.new_token_ids) for output in outputs] == [1, *[MOST] * 8]
    assert_nothing_left(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_planned_than_the_limits_leave(depth: int) -> None:
    """`max_tokens`, the context, and a token of the budget for everybody else."""
    core = make_core(pipeline_depth=depth, max_sampled_tokens=MOST, max_num_batched_tokens=12, max_num_seqs=4)
    core.add(make_request(range(120), "long", ignore_eos=True))
    core.add(make_request(range(5), "short", max_tokens=4))
    for number in range(2):
        core.add(make_request([number], f"r{number}", max_tokens=30))
    outputs = run_to_end(core)
    assert len(tokens_of(outputs["long"])) == 8
    assert len(tokens_of(outputs["short"])) == 4
    together = [plan for plan in simulated(core).plans if len(plan.request_ids) == 4 and not plan.new_requests]
    assert together
    assert all(max(plan.num_sampled_tokens) <= 12 // 4 for plan in together)
    assert_nothing_left(core)


def test_a_plan_made_on_more_tokens_than_come_is_right_all_the_same() -> None:
    """Blocks are there for the longest outcome, and what was not taken is computed again."""
    core = make_core(pipeline_depth=2, max_sampled_tokens=MOST, block_size=4, num_blocks=64)
    simulated(core).how_many = lambda most: min(most, 1)
    request = make_request(range(10), "a", max_tokens=24)
    core.add(request)
    core.step()
    core.step()
    known = core.scheduler.requests["a"]
    # Two steps of five are planned on the eleven tokens there were; one token has come of the first.
    assert [plan.num_scheduled_tokens for plan in simulated(core).plans] == [[10], [5], [5]]
    assert (known.num_tokens, known.num_computed_tokens, len(known.block_ids)) == (12, 11, 5)
    outputs = run_to_end(core)
    assert len(tokens_of(outputs["a"])) == 22  # and the two that came before
    assert_nothing_left(core)


class Reads(TokenMatcher):
    """A matcher that notes what it reads; complete with token 9, broken by token 8."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def accept(self, token_id: int) -> bool:
        self.read.append(token_id)
        self._error = "broken" if token_id == 8 else None
        return token_id == 9


@pytest.mark.parametrize(
    ("token_ids", "taken", "reason"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 9], FinishReason.STOP),
        ([1, 8, 9], [1, 8], FinishReason.ERROR),
        ([1, 5, 9], [1, 5], FinishReason.STOP),
        ([1, 2, 3, 4, 6], [1, 2, 3, 4], FinishReason.LENGTH),
        ([], [], None),
    ],
)
def test_a_grammar_reads_every_token_up_to_the_end(
    token_ids: list[int], taken: list[int], reason: FinishReason | None
) -> None:
    scheduler = make_scheduler(EngineConfig(max_model_len=32, eos_token_ids=(5,)), 8, 4)
    grammar = Reads()
    scheduler.add(make_request(range(3), "a", max_tokens=4, logprobs=0), grammar)
    plan = scheduler.schedule()
    logprobs = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in token_ids]
    (gain,) = scheduler.update(plan, ModelRunnerOutput(sampled_token_ids=[token_ids], logprobs={0: logprobs}))
    assert (grammar.read, gain.new_token_ids, gain.finish_reason) == (taken, taken, reason)
    assert [each.token_id for each in gain.logprobs or ()] == taken
    assert gain.is_complete == (taken[-1:] == [9])
    assert ("a" in scheduler.requests) == (reason is None)


def test_tokens_that_come_together_share_the_time_since_the_last_evenly() -> None:
    gaps: list[tuple[float, int]] = []

    class Observer(RecordingObserver):
        def on_inter_token(self, seconds: float, count: int) -> None:
            gaps.append((seconds, count))

    outputs = OutputProcessor(VOCABULARY, Observer())
    request = make_request([1], "a")
    stream = outputs.open([request], [request])
    stats = SchedulerStats(
        step=1,
        num_running=1,
        num_waiting=0,
        kv_cache_usage=0.0,
        num_preemptions=0,
        prompt_tokens=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
    )
    for timestamp, token_ids in ((10.0, [40, 41, 42]), (12.0, [43, 44, 45, 46]), (12.5, [47])):
        gain = EngineCoreOutput(request_id="a", new_token_ids=token_ids)
        outputs.process(EngineCoreOutputs(outputs=[gain], stats=stats, timestamp=timestamp))
    assert gaps == [(0.0, 2), (0.5, 4), (0.5, 1)]
    assert stream.drain()[0].num_output_tokens == 8
