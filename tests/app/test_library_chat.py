"""`LLM.chat` and `LLM.embed`, as users of vLLM call them, beside a server with the same model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.settings import SettingsError
from app.library import LLM
from engine.errors import InvalidRequest
from engine.messages import SamplingParams
from tests.support.harness import MODEL, Server
from tests.support.tiny_model import write_tiny_model

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Italy?"}]},
    ],
    [
        {"role": "user", "content": "Say <|im_end|> twice."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why not?"},
    ],
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, progress=False, kv_cache_memory="128MiB", max_model_len=2048, num_threads=1)


def served(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_one_conversation_and_a_batch_get_the_answers_of_the_server(llm: LLM, server: Server) -> None:
    expected = [served(server, each) for each in CONVERSATIONS]
    answers = llm.chat(CONVERSATIONS, GREEDY)
    assert [answer.choices[0].text for answer in answers] == [
        each["choices"][0]["message"]["content"] for each in expected
    ]
    assert [answer.prompt_token_ids for answer in answers] == [each["prompt_token_ids"] for each in expected]
    (one,) = llm.chat(CONVERSATIONS[0], sampling_params=GREEDY, use_tqdm=False)
    assert "Paris" in one.choices[0].text
    assert one.choices[0].text == answers[0].choices[0].text
    assert llm.chat([]) == []


def test_each_conversation_may_have_its_own_sampling(llm: LLM) -> None:
    lengths = [SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True) for number in (1, 2, 3)]
    assert [len(answer.choices[0].token_ids) for answer in llm.chat(CONVERSATIONS, lengths)] == [1, 2, 3]
    with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts"):
        llm.chat(CONVERSATIONS, lengths[:2])
    several = llm.chat(CONVERSATIONS[0], SamplingParams(n=2, seed=1, max_tokens=2))
    assert [choice.index for choice in several[0].choices] == [0, 1]


def test_tools_and_variables_reach_the_template(llm: LLM, server: Server) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    expected = served(server, question, tools=[WEATHER], tool_choice="auto")
    (answer,) = llm.chat(question, GREEDY, tools=[WEATHER])
    assert answer.prompt_token_ids == expected["prompt_token_ids"]
    assert answer.prompt_token_ids != llm.chat(question, GREEDY)[0].prompt_token_ids
    assert "\ud800" not in answer.choices[0].text
    with pytest.raises(InvalidRequest, match="chat_template_kwargs.*messages is set by the server") as refused:
        llm.chat(question, GREEDY, chat_template_kwargs={"messages": []})
    assert refused.value.param is not None


def test_a_final_message_is_continued(llm: LLM, server: Server) -> None:
    begun = [*CONVERSATIONS[0], {"role": "assistant", "content": "The capital of France is"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    expected = served(server, begun, **fields)
    (answer,) = llm.chat(begun, GREEDY, continue_final_message=True)
    assert answer.prompt_token_ids == expected["prompt_token_ids"]
    assert answer.choices[0].text == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "nobody", "content": "Hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            "messages.0.content.0.type",
        ),
        ([{"role": "user", "content": "Hi " * 9000}], "messages"),
    ],
)
def test_what_cannot_be_answered_is_named(llm: LLM, messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.chat(messages, GREEDY)
    assert refused.value.param in (param, "prompt")


@pytest.mark.slow
def test_vectors_are_those_of_the_server(llm: LLM, server: Server) -> None:
    texts = ["The sea is", "The capital of France is Paris.", "One, two, three"]
    answer = server.post("/v1/embeddings", {"input": texts}).json()
    expected = np.array([each["embedding"] for each in answer["data"]], np.float32)
    vectors = llm.embed(texts)
    assert [vector.dtype for vector in vectors] == [np.float32] * 3
    np.testing.assert_allclose(np.array(vectors), expected, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(np.array(vectors), axis=1), 1.0, rtol=1e-5)
    (one,) = llm.embed(texts[0], use_tqdm=False)
    np.testing.assert_array_equal(one, llm.embed([llm.tokenizer.encode(texts[0]).ids])[0])
    short = server.post("/v1/embeddings", {"input": texts[:1], "dimensions": 7, "pooling": "last"}).json()
    (cut,) = llm.embed(texts[:1], dimensions=7, pooling="last")
    np.testing.assert_allclose(cut, short["data"][0]["embedding"], atol=2e-3)
    assert np.linalg.norm(llm.embed("a", normalize=False)[0]) > 1.5
    assert len(llm.embed([f"Text {number}" for number in range(1100)], dimensions=2)) == 1100, "as many as one likes"
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"dimensions": 10**6}, "dimensions must be in"),
        ({"prompt_name": "query"}, "prompt_name must be a prompt of this model"),
        ({"dimensions": "x"}, "dimensions must be an integer"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"pooling": "max"}, "max"),
        ({"pooling": 5}, "pooling must be"),
    ],
)
def test_a_wrong_argument_of_embed_is_named(llm: LLM, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        llm.embed("a", **wrong)


def test_threads_and_running_event_loops_may_chat(llm: LLM) -> None:
    expected = [llm.chat(each, GREEDY)[0].choices[0].text for each in CONVERSATIONS]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda each: llm.chat(each, GREEDY)[0].choices[0].text, CONVERSATIONS)) == expected

    async def inside() -> str:
        return llm.chat(CONVERSATIONS[0], GREEDY)[0].choices[0].text

    assert asyncio.run(inside()) == expected[0]


@pytest.mark.slow
def test_a_file_replaces_the_template(tmp_path: Path) -> None:
    template = tmp_path / "shout.jinja"
    template.write_text("{% for m in messages %}{{ m.content | upper }}{{ suffix }}{% endfor %}")
    model = write_tiny_model(tmp_path / "tiny")
    common: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory": "4MiB", "max_model_len": 64}
    llm = LLM(str(model), progress=False, chat_template=str(template), **common)
    (answer,) = llm.chat(
        [{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1), chat_template_kwargs={"suffix": "!"}
    )
    assert llm.tokenizer.decode(answer.prompt_token_ids) == "HELLO!"
    with pytest.raises(SettingsError, match="chat_template: cannot read .*nowhere.jinja: No such file"):
        LLM(str(model), progress=False, chat_template=str(tmp_path / "nowhere.jinja"), **common)
