"""The offline front door: same core, same text, results in the order of the prompts."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from engine.core.core import EngineCore
from engine.errors import EngineDead, InvalidRequest, RequestFailed
from engine.frontend.llm import LLM, Generation
from engine.messages import FinishReason, SamplingParams
from engine.plan import SchedulerOutput
from tests.engine.helpers import assert_nothing_left, byte_level_tokenizer, make_core, simulated
from tests.engine.simulated_tokens import expected_output
from tests.support.interrupts import call_and_interrupt

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()


@pytest.fixture
def core() -> EngineCore:
    return make_core(vocab_size=VOCAB_SIZE, max_num_seqs=4)


def test_results_come_in_the_order_of_the_prompts(core: EngineCore) -> None:
    # The first ones take longest, so they finish last.
    prompts: list[str | list[int]] = [f"prompt number {number}" for number in range(9)]
    sampling = [SamplingParams(temperature=0.0, max_tokens=30 - 3 * number) for number in range(9)]
    results = LLM(core, TOKENIZER).generate(prompts, sampling)
    assert [TOKENIZER.decode(result.prompt_token_ids) for result in results] == prompts
    for result, params in zip(results, sampling, strict=True):
        (choice,) = result.choices
        expected = expected_output(result.prompt_token_ids, params, vocab_size=VOCAB_SIZE, max_model_len=128)
        assert choice.token_ids == expected.token_ids
        assert choice.finish_reason is FinishReason.LENGTH
        assert TOKENIZER.decode(choice.token_ids).startswith(choice.text)
    assert_nothing_left(core)


def test_prompts_may_be_token_ids_and_have_several_choices(core: EngineCore) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=0)
    (result,) = LLM(core, TOKENIZER).generate([[1, 2, 3]], sampling)
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in result.choices}) > 1
    for choice in result.choices:
        assert [entry.token_id for entry in choice.logprobs or []] == choice.token_ids


def test_a_string_is_one_prompt(core: EngineCore) -> None:
    (result,) = LLM(core, TOKENIZER).generate("two words", SamplingParams(temperature=0.0, max_tokens=2))
    assert TOKENIZER.decode(result.prompt_token_ids) == "two words"


def test_without_sampling_parameters_a_prompt_gets_the_models(core: EngineCore) -> None:
    models = SamplingParams(temperature=0.0, max_tokens=3)
    llm = LLM(core, TOKENIZER, default_sampling=models)
    assert llm.get_default_sampling_params() is models
    (result,) = llm.generate("two words")
    assert len(result.choices[0].token_ids) == 3
    (result,) = llm.generate("two words", SamplingParams(temperature=0.0, max_tokens=5))
    assert len(result.choices[0].token_ids) == 5


@pytest.mark.parametrize(
    ("prompts", "kind"), [(b"bytes", "bytes"), (["fine", b"bytes"], "bytes"), ([[1], 2], "int"), ([["a"]], "list")]
)
def test_a_prompt_that_is_no_text_and_no_token_ids_is_refused(core: EngineCore, prompts: Any, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^prompts must be texts or lists of token ids, got a {kind}"):
        LLM(core, TOKENIZER).generate(prompts)
    assert_nothing_left(core)


def test_the_same_seed_gives_the_same_tokens_in_any_company(core: EngineCore) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=10)
    llm = LLM(core, TOKENIZER)
    alone = llm.generate(["one"], sampling)[0].choices[0].token_ids
    together = llm.generate(["two", "one", "three"], sampling)[1].choices[0].token_ids
    assert alone == together


def test_an_invalid_prompt_is_refused_before_anything_runs(core: EngineCore) -> None:
    prompts: list[str | list[int]] = ["fine", []]
    with pytest.raises(InvalidRequest, match="The prompt is empty"):
        LLM(core, TOKENIZER).generate(prompts)
    assert core.num_steps == 0
    assert_nothing_left(core)


def test_one_sampling_for_all_or_one_for_each(core: EngineCore) -> None:
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        LLM(core, TOKENIZER).generate(["a"], [SamplingParams(), SamplingParams()])


def test_a_failed_step_is_raised_and_the_next_call_works() -> None:
    def break_second(plan: SchedulerOutput) -> None:
        if plan.step in (2, 3):  # once is forgiven
            raise RuntimeError("the device broke")

    core = make_core(vocab_size=VOCAB_SIZE, before_step=break_second)
    llm = LLM(core, TOKENIZER)
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    with pytest.raises(RequestFailed, match="RuntimeError"):
        llm.generate(["one"], sampling)
    assert_nothing_left(core)
    assert len(llm.generate(["one"], sampling)[0].choices[0].token_ids) == 4


def test_a_failed_callback_ends_its_call_and_nothing_else(core: EngineCore) -> None:
    def fail(num_finished: int, num_tokens: int) -> None:
        if num_tokens >= 5:
            raise LookupError("of the caller")

    llm = LLM(core, TOKENIZER)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    with pytest.raises(LookupError, match="of the caller"):
        llm.generate(["one", "two"], sampling, on_step=fail)
    assert_nothing_left(core)
    told: list[tuple[int, int]] = []
    (result,) = llm.generate(["one"], sampling, on_step=lambda *news: told.append(news))
    assert (
        result.choices[0].token_ids
        == expected_output(result.prompt_token_ids, sampling, vocab_size=VOCAB_SIZE, max_model_len=128).token_ids
    )
    assert told[-1] == (1, 30)
    assert len(told) == 30


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_hundred_interrupts_every_answer_is_that_of_a_new_object(depth: int) -> None:
    """At random moments: while the call starts, in prefill and decode, and as it ends."""
    core = make_core(vocab_size=VOCAB_SIZE, max_num_seqs=2, pipeline_depth=depth, before_step=pause)
    llm, draw = LLM(core, TOKENIZER), random.Random(depth)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = ["The sea is", "a prompt that takes two steps of prefill, or three"]
    expected = [tokens(each) for each in LLM(make_core(vocab_size=VOCAB_SIZE), TOKENIZER).generate(prompts, sampling)]
    num_interrupted = 0
    for _ in range(100):
        on_step = (lambda *news: None) if draw.random() < 0.5 else None
        call = partial(llm.generate, prompts[::-1], sampling, on_step=on_step)
        came, was_interrupted = call_and_interrupt(call, draw.random() * 0.012)
        assert came == was_interrupted
        num_interrupted += was_interrupted
        assert [tokens(each) for each in llm.generate(prompts, sampling)] == expected
        assert_nothing_left(core)
    assert num_interrupted > 20


def test_a_call_whose_thread_could_not_start_is_dropped(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(core, TOKENIZER)
    started = threading.Thread.start
    attempts = iter([KeyboardInterrupt()])

    def start(thread: threading.Thread) -> None:
        for error in attempts:
            raise error
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one"], SamplingParams(max_tokens=20))
    assert core.num_steps == 0
    assert_nothing_left(core)


def test_a_stop_string_ends_a_completion_early(core: EngineCore) -> None:
    llm = LLM(core, TOKENIZER)
    free = llm.generate(["one"], SamplingParams(temperature=0.0, max_tokens=60))[0].choices[0].text
    stop = free[10:12]
    (choice,) = llm.generate(["one"], SamplingParams(temperature=0.0, max_tokens=60, stop=(stop,)))[0].choices
    assert choice.text == free[: free.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stop)
    assert sum(simulated(core).computed.values()) < 2 * (3 + 60)
    assert_nothing_left(core)


def test_a_watched_call_gets_news_of_every_step(core: EngineCore) -> None:
    news: list[tuple[int, int]] = []
    sampling = SamplingParams(max_tokens=3)
    LLM(core, TOKENIZER).generate(["one", "two"], sampling, on_step=lambda *each: news.append(each))
    assert news == sorted(news)
    assert news[-1] == (2, 6)


@pytest.mark.parametrize("max_tokens", [None, 128, 10**12])
def test_a_limit_beyond_the_context_is_cut_to_what_fits(core: EngineCore, max_tokens: int | None) -> None:
    (result,) = LLM(core, TOKENIZER).generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(result.choices[0].token_ids) == core.config.max_model_len - 3
    assert result.choices[0].finish_reason is FinishReason.LENGTH


def test_threads_that_share_an_object_run_together_and_get_what_each_gets_alone() -> None:
    core = make_core(vocab_size=VOCAB_SIZE, max_num_seqs=8, num_blocks=128, before_step=pause)
    llm = LLM(core, TOKENIZER)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    texts = [f"thread {number}" for number in range(6)]
    ready = threading.Barrier(len(texts))

    def ask(text: str) -> list[list[int]]:
        ready.wait()
        return [tokens(llm.generate(text, sampling)[0]) for _ in range(5)]

    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(ask, texts))
    for text, answer in zip(texts, answers, strict=True):
        prompt = TOKENIZER.encode(text).ids
        alone = expected_output(prompt, sampling, vocab_size=VOCAB_SIZE, max_model_len=128).token_ids
        assert answer == [alone] * 5
    assert max(len(plan.request_ids) for plan in simulated(core).plans) > 3
    assert core.num_steps < 5 * 6 * 20 / 2


def test_callers_that_keep_the_engine_busy_pile_up_no_threads() -> None:
    llm = LLM(make_core(vocab_size=VOCAB_SIZE, max_num_seqs=8, num_blocks=128, before_step=pause), TOKENIZER)
    most = 0

    def ask(number: int) -> None:
        nonlocal most
        for count in range(20):
            llm.generate(f"thread {number}", SamplingParams(temperature=0.0, max_tokens=3 + (number + count) % 3))
            most = max(most, sum(thread.name == "headrace-llm" for thread in threading.enumerate()))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert most <= 2 + 4, "one that steps, one that waits, and for each caller one that ends at once"


def test_an_interrupted_call_does_not_touch_those_of_other_threads() -> None:
    core = make_core(vocab_size=VOCAB_SIZE, before_step=pause)
    llm = LLM(core, TOKENIZER)
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(llm.generate, "the other", sampling)
        with pytest.raises(LookupError):
            llm.generate("mine", sampling, on_step=raise_lookup)
        (result,) = other.result()
    expected = expected_output(result.prompt_token_ids, sampling, vocab_size=VOCAB_SIZE, max_model_len=128)
    assert tokens(result) == expected.token_ids
    assert_nothing_left(core)


def test_an_engine_that_dies_says_so_then_and_later(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(core, TOKENIZER)
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "update", raise_lookup)
        with pytest.raises(EngineDead, match="load the model again"):
            llm.generate("one", SamplingParams(max_tokens=5))
    with pytest.raises(EngineDead, match="load the model again"):
        llm.generate("one", SamplingParams(max_tokens=5))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_in_a_forked_process_is_refused_by_name(core: EngineCore) -> None:
    llm = LLM(core, TOKENIZER)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("one")
        except EngineDead as error:
            os.write(sender, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(receiver, 4096).decode()
    assert f"loaded by process {os.getpid()} and cannot be used in process {child}" in said
    assert "spawn" in said
    assert llm.generate("one", SamplingParams(max_tokens=2))


@pytest.mark.anyio
async def test_it_works_inside_a_running_event_loop_and_beside_another(core: EngineCore) -> None:
    other = make_core(vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    (one,), (two,) = (LLM(each, TOKENIZER).generate("text", sampling) for each in (core, other))
    assert tokens(one) == tokens(two)


def tokens(result: Generation) -> list[int]:
    return result.choices[0].token_ids


def pause(plan: SchedulerOutput) -> None:
    time.sleep(0.0005)


def raise_lookup(*args: object) -> None:
    raise LookupError
