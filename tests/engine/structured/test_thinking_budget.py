"""Reasoning that has taken its tokens is closed, whatever else the request asks for and whatever happens to it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.frontend.input_processor import InputProcessor
from engine.messages import EngineCoreOutput, EngineCoreRequest, StructuredOutput, StructuredOutputKind
from engine.structured.compiler import GrammarCompiler
from engine.structured.matchers import MAX_EXCESS, ThinkingBudget
from protocol.syntax.reasoning import ReasoningCounter, ReasoningTags
from tests.engine.helpers import assert_nothing_left, byte_level_tokenizer, make_core, make_request, tokens_of

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS = 258
COMPILER = GrammarCompiler(VOCABULARY, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
TAGS = ReasoningTags("<t>", "</t>")
BEGUN = ("", TAGS.closing)
CLOSING = TOKENIZER.encode(TAGS.closing).ids
DIGITS = StructuredOutput(kind=StructuredOutputKind.REGEX, value="[0-9]{4}", reasoning=BEGUN)


def num_reasoning_tokens(token_ids: list[int], *, is_open: bool) -> int:
    """As usage counts them."""
    counter = ReasoningCounter(TAGS, VOCABULARY.token_bytes, is_open=is_open)
    counter.count(token_ids)
    return counter.num_tokens


def prepared(request: EngineCoreRequest) -> EngineCoreRequest:
    """As the front door hands it over."""
    inputs = InputProcessor(TOKENIZER, vocab_size=VOCAB_SIZE, max_model_len=4096)
    [[child]] = inputs.process([request])
    return msgspec.structs.replace(child, request_id=request.request_id)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    budgets=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    num_blocks=st.integers(32, 48),
    depth=st.integers(1, 2),
    most=st.integers(1, 3),
)
def test_a_budget_is_kept_through_preemptions_beside_grammars_and_rules(
    budgets: list[int], num_blocks: int, depth: int, most: int
) -> None:
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "num_blocks": num_blocks,
        "pipeline_depth": depth,
        "max_sampled_tokens": most,
    }
    made = make_core(**options)
    core = EngineCore(made.config, made.executor, COMPILER)
    more: list[dict[str, Any]] = [
        {},
        {"structured_output": DIGITS},
        {"allowed_token_ids": (70, 71)},
        {"bad_words": (TAGS.closing,)},
    ]
    requests = [
        make_request(
            [number % 97, 5],
            str(number),
            seed=number,
            temperature=1.0,
            max_tokens=40,
            ignore_eos=True,
            thinking_token_budget=budget,
            reasoning_tags=BEGUN,
            **more[number % 4],
        )
        for number, budget in enumerate(budgets)
    ]
    for request in requests:
        core.add(prepared(request))
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for _ in range(2000):
        if not core.has_work:
            break
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        core.scheduler.check_integrity()
    assert_nothing_left(core)
    assert core.scheduler._table.num_grammars == 0
    for number, budget in enumerate(budgets):
        token_ids = tokens_of(outputs[str(number)])
        num_tokens = num_reasoning_tokens(token_ids, is_open=True)
        begin = num_tokens - len(CLOSING)
        assert token_ids[begin:num_tokens] == CLOSING
        assert budget <= begin <= budget + MAX_EXCESS
        for end in range(budget, begin):
            assert TOKENIZER.decode(token_ids[:end]).endswith("\ufffd"), "nothing but a character may be ended first"
        rest = TOKENIZER.decode(token_ids[num_tokens:])
        if number % 4 == 1:
            assert re.fullmatch(r"\s*[0-9]{4}", rest)
        elif number % 4 == 2:
            assert set(token_ids) <= {70, 71, *CLOSING}


def test_after_the_reasoning_nothing_is_restricted() -> None:
    made = make_core(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    core = EngineCore(made.config, made.executor, COMPILER)
    fields: dict[str, Any] = {"thinking_token_budget": 2, "reasoning_tags": BEGUN, "max_tokens": 30, "ignore_eos": True}
    core.add(prepared(make_request([1, 2], "a", **fields)))
    while core.scheduler.requests["a"].num_output_tokens <= 2 + len(CLOSING):
        core.step()
    assert core.scheduler.requests["a"].grammar is None


@given(
    text=st.text(alphabet="<t>/ a", max_size=30),
    budget=st.integers(0, 12),
    is_open=st.booleans(),
)
def test_the_count_is_that_of_the_usage(text: str, budget: int, is_open: bool) -> None:
    matcher = ThinkingBudget(
        budget,
        tags=("" if is_open else TAGS.opening, TAGS.closing),
        closing=CLOSING,
        token_bytes=VOCABULARY.token_bytes,
    )
    token_ids: list[int] = []
    for token_id in TOKENIZER.encode(text).ids:
        if matcher.rest is None or matcher._is_exhausted:
            break
        matcher.accept(token_id)
        token_ids.append(token_id)
    counted = num_reasoning_tokens(token_ids, is_open=is_open)
    if matcher.rest is not None and matcher._is_exhausted:
        # The opening tag may be longer than the budget; the reasoning ends with it then.
        opened = 0 if is_open else len(TOKENIZER.encode(TAGS.opening).ids)
        assert counted == len(token_ids)
        assert budget <= counted
        assert counted == budget or text[:counted].lstrip().startswith(TAGS.opening[:opened])
    elif matcher.rest is None and counted:
        assert TAGS.closing in TOKENIZER.decode(token_ids)


@pytest.mark.parametrize(("budget", "tags"), [(None, BEGUN), (3, None)])
def test_without_a_budget_or_without_tags_nothing_is_restricted(
    budget: int | None, tags: tuple[str, str] | None
) -> None:
    request = prepared(make_request([1], "a", thinking_token_budget=budget, reasoning_tags=tags))
    assert not request.sampling.restricts_tokens
