"""The library under vLLM's names, what it refuses, and where it may be used."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle  # noqa: TID251  (what multiprocessing does with outputs)
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from pydantic import BaseModel

import headrace
from headrace import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDead,
    HeadraceError,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    SettingsError,
    StructuredOutputsParams,
)
from tests.support.harness import REPOSITORY
from tests.support.tiny_model import tiny_server, write_tiny_model

SMALL: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory": "4MiB", "max_model_len": 256, "progress": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=2048))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **SMALL)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_prompt_is_a_text_ids_or_a_dict_with_either(llm: LLM) -> None:
    (output,) = llm.generate("The sea is", GREEDY)
    assert (output.prompt, output.finished, output.outputs) == ("The sea is", True, output.choices)
    assert output.outputs[0].new_text == output.outputs[0].text
    ids = output.prompt_token_ids
    forms: list[Any] = ["The sea is", {"prompt": "The sea is"}, ids, tuple(ids), {"prompt_token_ids": ids}]
    assert tokens(llm.generate(forms, sampling_params=GREEDY)) == tokens([output]) * 5
    assert tokens(llm.generate(iter(forms[:2]), GREEDY)) == tokens([output]) * 2
    for form in forms[1:]:
        assert tokens(llm.generate(form, GREEDY)) == tokens([output])
    (both,) = llm.generate({"prompt": "named so", "prompt_token_ids": ids}, GREEDY)
    assert (both.prompt, both.prompt_token_ids) == ("named so", ids)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts must be a prompt or a list of prompts, got None."),
        (5, "got a int."),
        ([None], "prompts must be texts or lists of token ids, got None."),
        ([["a"]], "got a list."),
        ({"text": "a"}, "A prompt as a dict has prompt or prompt_token_ids, got text."),
        ({}, "got nothing."),
        ({"prompt": None}, "got None."),
        ({"prompt_token_ids": "ab"}, "got a str."),
        (b"bytes", "got a bytes."),
        ("a \ud800", "A prompt has the lone surrogate U+D800, which is no text."),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        llm.generate(prompts, GREEDY)
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        llm.embed(prompts)


@pytest.mark.parametrize("messages", [None, "Hi", 5, [5], [[5]], {"role": "user"}])
def test_what_is_no_conversation_is_refused_in_words(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ],
)
def test_parameters_are_checked_when_they_are_made(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**fields)
    assert refused.value.param == param


def test_parameters_change_until_they_are_submitted(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, top_k=-1)
    assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 4
    params.max_tokens = 2  # type: ignore[misc]  # the engine's own parameters are frozen
    assert [len(each) for each in tokens(llm.generate(["a", "b"], params))] == [2, 2]
    params.max_tokens = "two"  # type: ignore[assignment, misc]
    with pytest.raises(InvalidRequest, match="max_tokens must be a whole number, got 'two'"):
        llm.generate("a", params)
    default = llm.get_default_sampling_params()
    default.max_tokens = 1  # type: ignore[misc]
    assert llm.get_default_sampling_params().max_tokens is None
    for wrong in (5, [None], "no"):
        with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams, or a list of them"):
            llm.generate(["a"], wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="give one"):
        llm.generate("a", GREEDY, sampling_params=GREEDY)
    assert pickle.loads(pickle.dumps(GREEDY)) == GREEDY
    assert pickle.loads(pickle.dumps(llm.generate("a", GREEDY)))[0].outputs[0].token_ids


class City(BaseModel):
    name: str


def test_the_form_of_an_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=1, structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    assert llm.generate("A colour:", params)[0].outputs[0].text in ("red", "blue")
    of_pydantic = SamplingParams(structured_outputs=StructuredOutputsParams(json=City)).submitted()
    of_dict = SamplingParams(structured_outputs=StructuredOutputsParams(json=City.model_json_schema())).submitted()
    assert of_pydantic == of_dict
    wrong: list[dict[str, Any]] = [{}, {"json": "{"}, {"regex": "a", "choice": ["a"]}, {"regx": "a"}, {"regex": 5}]
    for fields in wrong:
        with pytest.raises(InvalidRequest):
            StructuredOutputsParams(**fields)


def test_the_tokenizer_has_the_methods_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The sea")
    assert (tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.eos_token_ids) == ("The sea", 2048, (2,))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(messages, GREEDY)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == output.prompt_token_ids
    with pytest.raises(InvalidRequest, match="no option enable_thinking"):
        tokenizer.apply_chat_template(messages, enable_thinking=False)


def test_a_block_ends_the_engine_and_two_models_work_at_once(model: str, llm: LLM) -> None:
    expected = tokens(llm.generate("a", GREEDY))
    with LLM(model, **SMALL) as other:
        assert tokens(other.generate("a", GREEDY)) == expected
        other.chat([{"role": "user", "content": "a"}], GREEDY)
    with pytest.raises(EngineDead):
        other.generate("a", GREEDY)
    assert tokens(llm.generate("a", GREEDY)) == expected

    async def inside() -> list[RequestOutput]:
        return llm.generate("a", GREEDY)

    assert tokens(asyncio.run(inside())) == expected


def test_errors_can_be_imported() -> None:
    errors = ("InvalidRequest", "SettingsError", "ModelError", "ConfigError", "RequestFailed", "EngineDead")
    assert all(issubclass(getattr(headrace, name), HeadraceError) for name in errors)
    assert set(errors) <= set(headrace.__all__)
    with pytest.raises(SettingsError, match="max_model_len"):
        LLM(max_model_len=0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_async_request_is_a_scope(model: str, llm: LLM, backend: str) -> None:
    async def run() -> None:
        endless = SamplingParams(max_tokens=200, ignore_eos=True)
        async with AsyncLLM(model, **SMALL) as many:
            (expected,) = llm.generate("The sea", GREEDY)
            pieces, lengths = [], []
            async with many.generate("The sea", GREEDY) as outputs:
                async for output in outputs:
                    pieces.append(output.outputs[0].new_text)
                    lengths.append(len(output.outputs[0].token_ids))
            assert "".join(pieces) == output.outputs[0].text == expected.outputs[0].text
            assert (output.prompt, output.finished, lengths[-1]) == ("The sea", True, 4)
            assert sorted(lengths) == lengths
            async with many.chat([{"role": "user", "content": "Hi"}], endless) as outputs:
                async for _ in outputs:
                    break
            assert many._llm.num_open_choices == 0
            texts: dict[int, str] = {}

            async def answer(number: int) -> None:
                async for output in many.generate({"prompt_token_ids": [number + 5]}, GREEDY, f"id-{number}"):
                    texts[number] = output.outputs[0].text

            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(answer, number)
            alone = llm.generate([[number + 5] for number in range(4)], GREEDY)
            assert [texts[number] for number in range(4)] == [each.outputs[0].text for each in alone]
            with anyio.move_on_after(0.05):
                async for _ in many.generate("a", endless):
                    pass
            for wrong in ([None], 5):
                with pytest.raises(InvalidRequest):
                    async with many.generate(wrong):  # type: ignore[arg-type]
                        pass
            with pytest.raises(InvalidRequest, match="sampling_params"):
                many.generate("a", 5)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="open already"):
                async with many:
                    pass
            ended.append(many)
            raise KeyError("passes through as it is")

    ended: list[AsyncLLM] = []
    with pytest.raises(KeyError):
        anyio.run(run, backend=backend)
    with pytest.raises(HeadraceError, match="async with AsyncLLM"):
        ended[0].generate("The sea")
    with pytest.raises(HeadraceError, match="async with AsyncLLM"):
        AsyncLLM(model, **SMALL).generate("The sea")


def test_an_async_model_that_cannot_be_loaded_says_why_and_not_in_a_group(tmp_path: Path) -> None:
    deep = str(write_tiny_model(tmp_path / "deep", num_hidden_layers=24))

    async def run() -> None:
        async with AsyncLLM(deep, **{**SMALL, "kv_cache_memory": "1MiB", "max_model_len": 8000}):
            raise AssertionError("it has no room for its context")

    with pytest.raises(ConfigError, match="max_model_len is 8000"):
        asyncio.run(run())


def _answer(model: str) -> list[RequestOutput]:
    with LLM(model, **SMALL) as llm:
        return llm.generate("a", GREEDY)


@pytest.mark.slow
def test_a_spawned_process_has_a_model_of_its_own(model: str, llm: LLM) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert tokens(pool.apply(_answer, (model,))) == tokens(llm.generate("a", GREEDY))


@pytest.mark.slow
def test_scores_are_those_of_the_server(tmp_path: Path, llm: LLM) -> None:
    shape = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "initializer_range": 0.5}
    reranker = write_tiny_model(tmp_path / "Qwen3-Reranker-0.6B", **shape)
    pairs: dict[str, Any] = {"text_1": "Who pays?", "text_2": ["The town.", "Blue.", "A long text. " * 8]}
    with tiny_server(model=reranker) as server:
        answer = server.wait_ready().post("/v1/score", pairs).json()
    with LLM(str(reranker), load_format="dummy", kv_cache_memory="64MiB", progress=False) as scorer:
        scores = scorer.score(**pairs)
        np.testing.assert_allclose(scores, [each["score"] for each in answer["data"]], atol=1e-3)
        logits = scorer.score(**pairs, raw_scores=True)
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), rtol=1e-5)
        with pytest.raises(InvalidRequest, match="text_1 must be one text or as many"):
            scorer.score(["a", "b"], ["c"])
    with pytest.raises(InvalidRequest, match="gives no scores"):
        llm.score("a", "b")


@pytest.mark.slow
def test_every_example_of_the_page_runs() -> None:
    page = (REPOSITORY / "docs/library.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 10
    script = "\n".join(examples)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert not any(mark in done.stderr + done.stdout for mark in ("tok/s", "━", "Traceback")), "no bars are drawn"
