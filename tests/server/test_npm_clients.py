"""The clients of JavaScript programs: npm's `openai`, and Vercel's `ai` with its OpenAI-compatible provider.

`make npm` installs them. One run of tests/npm/clients.mjs drives the server with both and prints what they understood.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.server.harness import MODEL, REPOSITORY, Server

NPM = REPOSITORY / "tests" / "npm"
DIMENSIONS = 576
TIMEOUT = 100.0  # seconds for all of it


@pytest.fixture(scope="module")
def understood(server: Server) -> dict[str, dict[str, Any]]:
    assert (NPM / "node_modules").is_dir(), "the clients are not installed: make npm"
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    run = subprocess.run(
        ["node", str(NPM / "clients.mjs"), f"{server.base_url}/v1", MODEL],
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
    return server.chat("What is the capital of France?", max_tokens=12)


def test_npm_openai(understood: dict[str, dict[str, Any]], answer: dict[str, Any], server: Server) -> None:
    found = understood["openai"]
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


def test_vercel_ai(understood: dict[str, dict[str, Any]], answer: dict[str, Any]) -> None:
    found = understood["vercel"]
    assert found["text"] == found["streamed"] == answer["choices"][0]["message"]["content"]
    for usage in (found["usage"], found["streamedUsage"]):
        assert usage["inputTokens"] == answer["usage"]["prompt_tokens"]
        assert usage["outputTokens"] == answer["usage"]["completion_tokens"]
    assert found["finishReason"] == answer["choices"][0]["finish_reason"]
    assert found["object"]["city"] in ("Paris", "Rome")
    assert found["calls"]
    for call in found["calls"]:
        assert call["toolName"] == "weather"
        assert call["input"]["city"] in ("Paris", "Rome")
    assert found["embeddings"] == [DIMENSIONS, DIMENSIONS]
    assert found["error"]["status"] == 400
    assert "temperature" in found["error"]["message"]
