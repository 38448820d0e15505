"""Requests that are long to check: what they share is looked at once, beside the event loop, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import anyio
import pytest
from msgspec import structs
from tokenizers import Encoding, Tokenizer

from engine.frontend.async_llm import INLINE_MICROSECONDS
from engine.frontend.input_processor import InputProcessor
from engine.messages import MAX_N, EngineCoreRequest, RequestOutput
from tests.engine.helpers import make_request, until
from tests.engine.serving import TOKENIZER, VOCAB_SIZE, Running, collect, read_one, running

pytestmark = pytest.mark.anyio


def long_to_check() -> list[EngineCoreRequest]:
    return [make_request(range(first, first + 4), max_tokens=2, n=MAX_N, ignore_eos=True) for first in range(3)]


async def read_all(engine: Running, requests: list[EngineCoreRequest]) -> list[RequestOutput]:
    async with engine.llm.stream(*requests) as stream:
        return await collect(stream)


class CountingTokenizer:
    """The real tokenizer, and how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def encode(self, text: str, **options: bool) -> Encoding:
        self.count += 1
        return TOKENIZER.encode(text, **options)


async def test_what_prompts_share_is_checked_and_tokenized_once() -> None:
    tokenizer = CountingTokenizer()
    inputs = InputProcessor(cast("Tokenizer", tokenizer), vocab_size=VOCAB_SIZE, max_model_len=128, seed=0)
    first = make_request(range(4), max_tokens=1, bad_words=("a", "bc"), n=3)
    others = [structs.replace(first, prompt_token_ids=[5, 6, 7, number]) for number in range(8, 40)]
    choices = inputs.process([first, *others])
    assert tokenizer.count == 4  # each word at the start of a text and behind a blank
    words = choices[0][0].sampling.bad_words_token_ids
    assert words
    assert all(child.sampling.bad_words_token_ids is words for children in choices for child in children)
    assert [len(children) for children in choices] == [3] * 33


async def test_a_request_that_is_left_while_it_is_checked_never_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, may_pass = threading.Event(), threading.Event()
    process = InputProcessor.process

    def slow(self: InputProcessor, requests: Sequence[EngineCoreRequest]) -> list[list[EngineCoreRequest]]:
        if threading.current_thread() is not loop_thread:
            entered.set()
            may_pass.wait(30)
        return process(self, requests)

    loop_thread = threading.current_thread()
    monkeypatch.setattr(InputProcessor, "process", slow)
    async with running() as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, engine, long_to_check())
            await until(entered.is_set)
            tasks.cancel_scope.cancel()
        may_pass.set()
        await read_one(engine, make_request(range(20), max_tokens=3))  # checked on the loop: it is short
        assert max(len(plan.request_ids) for plan in engine.executor.plans) == 1
        assert len(engine.observer.finished) == 1
        await engine.assert_nothing_left()


async def test_a_request_that_is_long_to_check_is_answered_as_any_other() -> None:
    async with running() as engine:
        requests = long_to_check()
        assert InputProcessor.cost(requests) > INLINE_MICROSECONDS
        outputs = await read_all(engine, requests)
        assert sum(len(output.token_ids) for output in outputs) == 3 * MAX_N * 2
        await engine.assert_nothing_left()
