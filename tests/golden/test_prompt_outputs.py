"""What requests ask of their prompts, as transformers computes it: log-probabilities of its tokens, hidden states."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.frontend.llm import LLM
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, Pooling, SamplingParams
from tests.golden.driving import Story, drive, fresh_core
from tests.golden.oracle import Oracle
from tests.golden.prompts import PROMPTS


@pytest.fixture(scope="module")
def prompt(smollm2: LLM) -> list[int]:
    return smollm2.tokenizer.encode(" ".join(PROMPTS)).ids[:120]


def request(name: str, prompt: list[int], *, pooling: Pooling | None = None, **sampling: Any) -> EngineCoreRequest:
    params = SamplingParams(**({"temperature": 0.0, "seed": 0, "max_tokens": 0} | sampling))
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, sampling=params, arrival_time=0.0, pooling=pooling
    )


def assert_prompt_agrees(oracle: Oracle, prompt: list[int], story: Story, name: str) -> None:
    entries = [entry for output in story.outputs[name] for entry in output.prompt_logprobs or ()]
    oracle.assert_agrees(prompt[:1], prompt[1:], entries, greedy=False)


def the_end(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    *_, last = outputs
    return last


@pytest.mark.slow
def test_log_probabilities_of_every_prompt_token_but_the_first(smollm2, smollm2_oracle, prompt):
    core = fresh_core(smollm2.core, max_num_batched_tokens=100)
    story = drive(
        core,
        {
            0: [request("fills the cache", prompt, max_tokens=3)],
            3: [
                request("scores", prompt, prompt_logprobs=2),
                request("goes on", prompt, prompt_logprobs=0, max_tokens=3),
                request("one token", prompt[:1], prompt_logprobs=1, max_tokens=1),
            ],
        },
    )
    assert_prompt_agrees(smollm2_oracle, prompt, story, "scores")
    assert_prompt_agrees(smollm2_oracle, prompt, story, "goes on")
    assert story.tokens("goes on") == story.tokens("fills the cache")
    assert [output.prompt_logprobs for output in story.outputs["one token"]] == [[]]
    end = the_end(story.outputs["scores"])
    assert (end.new_token_ids, end.finish_reason, end.num_cached_tokens) == ([], FinishReason.LENGTH, 0)


@pytest.mark.slow
def test_a_preempted_prompt_gives_each_position_once(smollm2, smollm2_oracle, prompt):
    # Ten blocks: eight for the prompt, whose last one is missing as soon as the other request has its third.
    core = fresh_core(smollm2.core, num_blocks=10, max_model_len=160, max_num_batched_tokens=8, max_num_seqs=4)
    decoding = request("decodes", prompt[:20], max_tokens=40, ignore_eos=True)
    story = drive(core, {0: [decoding], 3: [request("scores", prompt, prompt_logprobs=1)]})
    assert story.num_preemptions > 0
    assert_prompt_agrees(smollm2_oracle, prompt, story, "scores")


@pytest.mark.slow
def test_hidden_states_pooled(smollm2, smollm2_oracle, prompt):
    with torch.inference_mode():
        hidden = smollm2_oracle.model.model(torch.tensor([prompt])).last_hidden_state[0]
    for chunk in (512, 7):
        core = fresh_core(smollm2.core, max_num_batched_tokens=chunk, max_num_seqs=4)
        story = drive(
            core,
            {
                0: [request("fills the cache", prompt)],
                20: [request(each, prompt, pooling=Pooling(each)) for each in ("mean", "last", "tokens")],
            },
        )
        for name, expected, cached in (("mean", hidden.mean(0), 0), ("last", hidden[-1], 112), ("tokens", hidden, 0)):
            end = the_end(story.outputs[name])
            assert end.embedding is not None
            vector = np.frombuffer(end.embedding, np.float32).reshape(expected.shape)
            np.testing.assert_allclose(vector, expected.numpy(), atol=2e-3 * float(expected.abs().max()))
            assert end.num_cached_tokens == cached


@pytest.mark.slow
def test_a_prompt_alone_may_fill_the_context(smollm2, smollm2_oracle):
    core = fresh_core(smollm2.core, max_model_len=32)
    full = [7 * i + 100 for i in range(32)]
    story = drive(core, [request("full", full, prompt_logprobs=0)])
    assert_prompt_agrees(smollm2_oracle, full, story, "full")


@pytest.mark.slow
def test_a_salt_keeps_prefixes_apart(smollm2, prompt):
    core = fresh_core(smollm2.core)
    salted = request("salted", prompt, max_tokens=1)
    salted.cache_salt = "mine"
    again = request("again", prompt, max_tokens=1)
    again.cache_salt = "mine"
    story = drive(core, {0: [request("plain", prompt, max_tokens=1)], 2: [salted], 4: [again]})
    assert [story.num_cached_tokens(name) for name in ("plain", "salted", "again")] == [0, 0, 112]
