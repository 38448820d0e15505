"""The offline front door: same core, same text, results in the order of the prompts."""

from __future__ import annotations

import pytest

from engine.core.core import EngineCore
from engine.errors import InvalidRequest, RequestFailed
from engine.frontend.llm import LLM
from engine.messages import FinishReason, SamplingParams
from engine.scheduler.plan import SchedulerOutput
from tests.engine.helpers import assert_nothing_left, byte_level_tokenizer, make_core, simulated
from tests.engine.simulated_tokens import expected_output

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


def test_what_is_no_number_is_refused_by_name(core: EngineCore) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens must be a number, got '3'\.$"):
        LLM(core, TOKENIZER).generate(["fine"], SamplingParams(max_tokens="3"))  # type: ignore[arg-type]
    assert_nothing_left(core)


def test_the_same_seed_gives_the_same_tokens_in_any_company(core: EngineCore) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=10)
    llm = LLM(core, TOKENIZER)
    alone = llm.generate(["one"], sampling)[0].choices[0].token_ids
    together = llm.generate(["two", "one", "three"], sampling)[1].choices[0].token_ids
    assert alone == together


def test_an_invalid_prompt_is_refused_before_anything_runs(core: EngineCore) -> None:
    with pytest.raises(InvalidRequest, match="The prompt is empty"):
        LLM(core, TOKENIZER).generate(["fine", []])
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


def test_an_interrupt_leaves_nothing_behind() -> None:
    def interrupt(plan: SchedulerOutput) -> None:
        if plan.step == 3:
            raise KeyboardInterrupt

    core = make_core(vocab_size=VOCAB_SIZE, before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(core, TOKENIZER).generate(["one", "two"], SamplingParams(max_tokens=20))
    assert_nothing_left(core)


def test_a_stop_string_ends_a_completion_early(core: EngineCore) -> None:
    llm = LLM(core, TOKENIZER)
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    free = llm.generate(["one"], sampling)[0].choices[0].text
    stop = free[10:12]
    (choice,) = llm.generate(["one"], SamplingParams(temperature=0.0, max_tokens=60, stop=(stop,)))[0].choices
    assert choice.text == free[: free.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stop)
    assert sum(simulated(core).computed.values()) < 2 * (3 + 60)
    assert_nothing_left(core)


def test_whoever_asks_is_told_of_every_step(core: EngineCore) -> None:
    told: list[tuple[int, int]] = []
    LLM(core, TOKENIZER).generate(
        ["one", "two"], SamplingParams(max_tokens=3), on_step=lambda finished, tokens: told.append((finished, tokens))
    )
    assert told == sorted(told)
    assert told[-1] == (2, 6)


@pytest.mark.parametrize("max_tokens", [None, 128, 10**12])
def test_a_limit_beyond_the_context_is_cut_to_what_fits(core: EngineCore, max_tokens: int | None) -> None:
    (result,) = LLM(core, TOKENIZER).generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(result.choices[0].token_ids) == core.config.max_model_len - 3
    assert result.choices[0].finish_reason is FinishReason.LENGTH
