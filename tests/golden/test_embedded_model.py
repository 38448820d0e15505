"""The embedded model, greedy, token for token as transformers says it: 10 prompts, 32 tokens, however they are run."""

import pytest

from engine.frontend.llm import LLM
from engine.messages import FinishReason, SamplingParams
from engine.plan import NewRequestData
from tests.golden.driving import RecordedExecutor, fresh_llm, plans_of
from tests.golden.oracle import Oracle
from tests.golden.prompts import PROMPTS
from tests.gpu.runner.test_rows import plan_of

NUM_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(smollm2: LLM) -> list[list[int]]:
    return [smollm2.tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2_oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' `generate()` gives."""
    return smollm2_oracle.generate(prompts, NUM_TOKENS)


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [result.choices[0].token_ids for result in llm.generate(prompts, sampling)]


@pytest.mark.slow
def test_no_token_is_so_close_a_call_that_rounding_could_decide_it(smollm2_oracle, prompts, expected):
    """What makes equality a fair demand of the tests below; and generate() agrees with itself without its cache."""
    for prompt, output in zip(prompts, expected, strict=True):
        best = smollm2_oracle.logprobs(prompt, output).topk(2)
        assert best.indices[:, 0].tolist() == output
        assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-3


@pytest.mark.storm
def test_all_prompts_at_once_say_what_transformers_says_for_twice_as_many_tokens(smollm2, smollm2_oracle, prompts):
    theirs = smollm2_oracle.generate(prompts, 2 * NUM_TOKENS)
    for prompt, ours, expected in zip(
        prompts, generate(fresh_llm(smollm2), prompts, 2 * NUM_TOKENS), theirs, strict=True
    ):
        smollm2_oracle.assert_says(prompt, ours, expected)


@pytest.mark.slow
def test_all_prompts_at_once_and_again_from_the_cache_say_what_transformers_says(
    smollm2, smollm2_oracle, prompts, expected
):
    llm = fresh_llm(smollm2)
    for prompt, ours, theirs in zip(prompts, generate(llm, prompts), expected, strict=True):
        smollm2_oracle.assert_says(prompt, ours, theirs)
    assert max(len(plan) for plan in plans_of(llm.core)) == len(prompts)

    again = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    block_size = llm.core.executor.block_size
    for prompt, result, theirs in zip(prompts, again, expected, strict=True):
        assert result.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
        smollm2_oracle.assert_says(prompt, result.choices[0].token_ids, theirs[:8])


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [8, pytest.param(NUM_TOKENS, marks=pytest.mark.storm)])
def test_each_prompt_alone_says_what_transformers_says(smollm2, smollm2_oracle, prompts, expected, num_tokens):
    llm = fresh_llm(smollm2, enable_prefix_caching=False)
    for prompt, theirs in zip(prompts, expected, strict=True):
        smollm2_oracle.assert_says(prompt, generate(llm, [prompt], num_tokens)[0], theirs[:num_tokens])
    assert max(len(plan) for plan in plans_of(llm.core)) == 1


@pytest.mark.slow
def test_small_chunks_few_slots_and_few_blocks_change_no_token(smollm2, smollm2_oracle, prompts, expected):
    llm = fresh_llm(smollm2, num_blocks=20, max_model_len=320, max_num_seqs=7, max_num_batched_tokens=13)
    for prompt, ours, theirs in zip(prompts, generate(llm, prompts), expected, strict=True):
        smollm2_oracle.assert_says(prompt, ours, theirs)
    plans = plans_of(llm.core)
    assert sum(max(plan.values()) > 1 for plan in plans) > 10, "prefills are cut into chunks"
    assert any({1} < set(plan.values()) for plan in plans), "which share steps with decodes"
    assert isinstance(llm.core.executor, RecordedExecutor)
    introduced = [new.request_id for plan in llm.core.executor.plans for new in plan.new_requests]
    assert len(introduced) > len(set(introduced)) == len(prompts), "somebody was preempted and came back"


@pytest.mark.slow
def test_a_loop_written_by_hand_says_what_the_engine_says(smollm2, smollm2_oracle, prompts, expected):
    """Plan, run, pick, bookkeep without engine.scheduler.scheduler and its block pool: every request has blocks of its
    own."""
    executor = fresh_llm(smollm2).core.executor
    num_tokens = 24
    tokens = {str(i): list(prompts[i]) for i in range(3)}
    num_computed = dict.fromkeys(tokens, 0)
    num_blocks = -(-(max(map(len, tokens.values())) + num_tokens) // executor.block_size)
    new = [
        NewRequestData(
            request_id=name,
            token_ids=list(known),
            num_prompt_tokens=len(known),
            num_computed_tokens=0,
            block_ids=list(range(i * num_blocks, (i + 1) * num_blocks)),
            sampling=SamplingParams(temperature=0.0, seed=0),
            stop_token_ids=[],
        )
        for i, (name, known) in enumerate(tokens.items())
    ]
    for step in range(num_tokens):
        counts = {name: len(known) - num_computed[name] for name, known in tokens.items()}
        plan = plan_of(counts, new=new if step == 0 else [])
        sampled = executor.submit(plan).result().sampled_token_ids
        for name, token_ids in zip(tokens, sampled, strict=True):
            num_computed[name] = len(tokens[name])
            tokens[name] += token_ids
    executor.submit(plan_of({}, removed=list(tokens))).result()

    for prompt, known, theirs in zip(prompts, tokens.values(), expected, strict=False):
        smollm2_oracle.assert_says(prompt, known[len(prompt) :], theirs[:num_tokens])


def test_logprobs_are_those_of_transformers(smollm2, smollm2_oracle, prompts):
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
    drawn = SamplingParams(temperature=1.2, max_tokens=8, ignore_eos=True, logprobs=5, seed=3)
    sampling = [greedy, drawn] * (len(prompts) // 2)
    results = fresh_llm(smollm2).generate(prompts, sampling)
    for prompt, params, result in zip(prompts, sampling, results, strict=True):
        choice = result.choices[0]
        assert choice.finish_reason is FinishReason.LENGTH
        smollm2_oracle.assert_agrees(prompt, choice.token_ids, choice.logprobs, greedy=params.greedy)
