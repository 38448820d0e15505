"""The clients of JavaScript programs: npm's `openai`, and Vercel's `ai` with its providers.

`make npm` installs them. The scripts of tests/integration/npm each drive a server once and print what they understood.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.support.harness import MODEL, REPOSITORY, Server
from tests.support.tiny_model import NAME, tiny_server

NPM = REPOSITORY / "tests" / "integration" / "npm"
QUESTION = "What is the capital of France?"
CITIES = ("Paris", "Rome")
DIMENSIONS = 576
TIMEOUT = 100.0  # seconds for all of it


def drive(script: str, base_url: str, model: str = MODEL) -> dict[str, Any]:
    assert (NPM / "node_modules").is_dir(), "the clients are not installed: make npm"
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    run = subprocess.run(
        ["node", str(NPM / script), base_url, model],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def answer(server: Server) -> dict[str, Any]:
    return server.chat(QUESTION, max_tokens=12)


def test_npm_openai(answer: dict[str, Any], server: Server) -> None:
    found = drive("openai.mjs", f"{server.base_url}/v1")
    text = answer["choices"][0]["message"]["content"]
    assert found["models"] == [MODEL]
    assert found["text"] == found["streamed"] == found["accumulated"] == text
    tokens = ("prompt_tokens", "completion_tokens", "total_tokens")
    for usage in (found["usage"], found["streamedUsage"]):
        assert [usage[name] for name in tokens] == [answer["usage"][name] for name in tokens]
    assert found["finishReason"] == answer["choices"][0]["finish_reason"]
    assert found["parsed"]["city"] in ("Paris", "Rome")
    assert isinstance(found["parsed"]["large"], bool)
    assert found["call"]["name"] == "weather"
    assert found["call"]["arguments"]["city"] in ("Paris", "Rome")
    assert found["completion"] == server.complete("One, two,", max_tokens=4)["choices"][0]["text"]
    assert found["embeddings"] == [DIMENSIONS, DIMENSIONS]
    assert found["response"] == text
    assert found["events"][:2] == ["response.created", "response.in_progress"]
    assert found["events"][-1] in ("response.completed", "response.incomplete")
    assert found["error"] == {"type": "BadRequestError", "status": 400, "param": "temperature"}


@pytest.fixture(scope="module")
def vercel(server: Server) -> dict[str, Any]:
    """What each provider has understood, and how many requests the server has cut off for that."""
    before = server.wait_idle()
    found = drive("vercel.mjs", f"{server.base_url}/v1")
    after = server.wait_idle()
    return found | {"aborted": after.aborted - before.aborted}


PROVIDERS = ("compatible", "chat", "responses", "anthropic")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_vercel_ai(vercel: dict[str, Any], provider: str, server: Server) -> None:
    found = vercel[provider]
    answer = server.chat(QUESTION)
    assert found["text"] == found["streamed"] == answer["choices"][0]["message"]["content"]
    for usage in (found["usage"], found["streamedUsage"]):
        assert usage["inputTokens"] == answer["usage"]["prompt_tokens"]
        assert usage["outputTokens"] == answer["usage"]["completion_tokens"]
    assert found["finishReason"] == found["streamedFinishReason"] == "stop"
    for place in (found["object"], found["streamedObject"]):
        assert place["city"] in CITIES
        assert isinstance(place["large"], bool)
    assert found["error"] == {"name": "AI_APICallError", "status": 404, "message": found["error"]["message"]}
    assert "nothing" in found["error"]["message"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("way", ["round", "streamedRound"])
def test_vercel_ai_calls_a_tool_and_answers_with_its_result(vercel: dict[str, Any], provider: str, way: str) -> None:
    calling, answering = vercel[provider][way]
    assert calling["finishReason"] == "tool-calls"
    assert calling["calls"]
    for call, result in zip(calling["calls"], calling["results"], strict=True):
        assert call["toolName"] == "weather"
        assert call["input"]["city"] in CITIES
        assert result == {**call["input"], "sky": "rain"}
    assert answering["text"]
    assert not answering["calls"]


def test_vercel_ai_that_stops_reading_frees_its_slots(vercel: dict[str, Any]) -> None:
    for provider in PROVIDERS:
        assert {"text-delta", "abort"} <= set(vercel[provider]["parts"])
    assert vercel["aborted"] == len(PROVIDERS)


def test_vercel_ai_makes_vectors(vercel: dict[str, Any]) -> None:
    assert vercel["compatible"]["embeddings"] == vercel["chat"]["embeddings"] == [DIMENSIONS, DIMENSIONS]


def test_vercel_ai_tells_reasoning_from_the_answer() -> None:
    with tiny_server(reasoning_parser="think") as running:
        understood = drive("reasoning.mjs", f"{running.wait_ready().base_url}/v1", NAME)
    for found in understood.values():
        assert found["reasoning"] == found["streamed"] != ""
        assert found["text"] == ""
        assert "text-delta" not in found["parts"]
