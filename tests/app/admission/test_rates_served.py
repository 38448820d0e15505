"""Requests and tokens per minute of a server with several engines, as SDKs see them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from app.admission.tenants import Tenants
from app.config.settings import Settings, SettingsError
from tests.support.harness import Server
from tests.support.tenants import ask, tenant_server
from tests.support.tiny_model import deployed_tiny_server

FILE = """
[tenants.few]
keys = ["few-requests"]
requests_per_minute = 4

[tenants.short]
keys = ["short-of-tokens"]
tokens_per_minute = 400
requests_per_minute = 1000

[tenants.free]
keys = ["free"]
"""
WORDS = "x-ratelimit-"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = {"data_parallel_size": 2, "max_model_len": 4096}
    with tenant_server(deployed_tiny_server, tmp_path, FILE, "free", **settings) as running:
        yield running


@pytest.mark.slow
def test_limits_hold_over_all_engines_and_are_told_in_headers(server: Server) -> None:
    # Requests. Refused ones do not count, nor what generates nothing.
    answers = [ask(server, "few-requests") for _ in range(3)]
    assert [answer.headers[f"{WORDS}remaining-requests"] for answer in answers] == ["3", "2", "1"]
    assert {answer.headers[f"{WORDS}limit-requests"] for answer in answers} == {"4"}
    assert f"{WORDS}limit-tokens" not in answers[0].headers, "there is none"
    assert ask(server, "few-requests", temperature=-1).status_code == 400
    assert ask(server, "few-requests", prompt=[5] * 5000).headers[f"{WORDS}remaining-requests"] == "1"  # too long
    assert ask(server, "few-requests", "/tokenize").headers[f"{WORDS}remaining-requests"] == "1"
    fourth = ask(server, "few-requests", stream=True)
    assert (fourth.status_code, fourth.headers[f"{WORDS}remaining-requests"]) == (200, "0")
    refused = ask(server, "few-requests")
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "tenant 'few' on requests per minute: limit 4, used 4, requested 1" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 15
    assert refused.headers[f"{WORDS}remaining-requests"] == "0"
    assert refused.headers[f"{WORDS}reset-requests"].endswith("s")

    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="few-requests", max_retries=0) as sdk:
        with pytest.raises(openai.RateLimitError) as seen:
            sdk.embeddings.create(model="tiny-4096", input="Hi")
        assert seen.value.code == "rate_limit_exceeded"
        assert seen.value.response.headers[f"{WORDS}limit-requests"] == "4"
    other = anthropic.Anthropic(base_url=server.base_url, api_key="few-requests", max_retries=0)
    with other, pytest.raises(anthropic.RateLimitError, match="requests per minute"):
        other.messages.create(model="tiny-4096", max_tokens=1, messages=[{"role": "user", "content": "Hi"}])

    # Tokens: the prompt's when it is admitted, the answer's when they are there.
    prompt = list(range(1000, 1050))
    first = ask(server, "short-of-tokens", prompt=prompt, max_tokens=100)
    used = 400 - int(first.headers[f"{WORDS}remaining-tokens"])
    assert 140 <= used <= 150, "some have come back since it was admitted"
    streamed = ask(server, "short-of-tokens", prompt=prompt, max_tokens=100, stream=True)
    assert int(streamed.headers[f"{WORDS}remaining-tokens"]) > 400 - 150 - 100, "none of its answer is there yet"
    refused = ask(server, "short-of-tokens", prompt=list(range(1000, 1300)), max_tokens=1)
    assert refused.status_code == 429
    assert "tenant 'short' on tokens per minute: limit 400, used 2" in refused.json()["error"]["message"]
    assert "requested 300" in refused.json()["error"]["message"]
    assert ask(server, "short-of-tokens").status_code == 200

    # A client that leaves has used what was generated for it.
    before = server.wait_idle().generation_tokens
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True},
        headers={"authorization": "Bearer short-of-tokens"},
    ) as stream:
        server.wait_until(lambda now: now.generation_tokens > before + 300)
        assert stream.status_code == 200
    server.wait_idle()
    refused = ask(server, "short-of-tokens")
    assert refused.status_code == 429
    assert refused.headers[f"{WORDS}remaining-tokens"] == "0"

    samples = server.metrics().samples
    assert samples["vllm:admission_rejections_total{reason=tokens_per_minute}"] == 2
    assert samples["vllm:admission_rejections_total{reason=requests_per_minute}"] == 3
    assert not any(name.startswith(WORDS) for name in ask(server, "free").headers)

    # SIGHUP changes a limit at once.
    file = Path(str(server.setting("api_keys_file")))
    file.write_text(FILE.replace("requests_per_minute = 4\n", "requests_per_minute = 100000\n"))
    server.send_signal(signal.SIGHUP)
    server.poll(lambda: ask(server, "few-requests"), lambda answer: answer.status_code == 200, 0.1)


@pytest.mark.parametrize("limit", ["requests_per_minute = 0", "tokens_per_minute = -1", 'tokens_per_minute = "many"'])
def test_a_limit_that_is_none_is_named(limit: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants.a]\nkeys = ["k"]\n{limit}\n')
    with pytest.raises(SettingsError, match=f"tenants.a in .* is wrong at {limit.partition(' ')[0]} = .*per_minute"):
        Tenants(Settings(api_keys_file=file))
