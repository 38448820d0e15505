"""A request that leaves its sampling open is answered as the model's authors recommend, through every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.harness import MODEL, TIMEOUT, Server

AUTHORS = {"temperature": 0.2, "top_p": 0.9}
OPENAI = {"temperature": 1.0, "top_p": 1.0}
QUESTION = "Name an animal, and say why."
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12},
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 12},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 12},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12},
}


def text(server: Server, path: str, **fields: Any) -> str:
    answer = server.post(path, DIALECTS[path] | {"seed": 5} | fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        choice = body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    return (body.get("output") or [body])[0]["content"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("path", DIALECTS)
def test_an_open_request_is_sampled_as_the_authors_recommend(server: Server, path: str) -> None:
    assert text(server, path) == text(server, path, **AUTHORS) == text(server, path, temperature=None, top_p=None)
    assert text(server, path, **OPENAI) != text(server, path)


def test_a_model_card_and_a_response_tell_what_is_in_force(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=TIMEOUT) as client:
        (card,) = client.models.list().data
        told = card.model_dump()["default_parameters"]
        assert told == AUTHORS | {
            **dict.fromkeys(("top_k", "min_p", "presence_penalty", "frequency_penalty"), 0),
            "repetition_penalty": 1.0,
            "max_tokens": None,
        }
        assert card.model_dump()["chat_parameters"] == {"frequency_penalty": 0.3}
        response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1, top_p=0.5)
        assert (response.temperature, response.top_p) == (0.2, 0.5)
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", timeout=TIMEOUT) as client:
        assert client.models.list().data[0].id == MODEL  # whose shape has no place for it
    assert "recommend: temperature 0.2, top_p 0.9" in server.log


@pytest.fixture(scope="module")
def neutral() -> Iterator[Server]:
    with Server(sampling_defaults="openai", admin_keys="admin") as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_an_operator_may_prefer_openais_defaults(neutral: Server) -> None:
    path = "/v1/chat/completions"
    assert text(neutral, path) == text(neutral, path, **OPENAI) != text(neutral, path, **AUTHORS)
    info = neutral.client.get("/server_info", headers={"authorization": "Bearer admin"}).json()
    assert (info["settings"]["sampling_defaults"], info["tool_syntax"]) == ("openai", "described")
    told = info["default_sampling_params"]
    assert told == told | OPENAI | {"top_k": 0, "max_tokens": None}
    assert "authors recommend" not in neutral.log
