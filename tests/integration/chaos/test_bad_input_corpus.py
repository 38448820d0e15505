"""Two hundred ways to be wrong, one after the other, beside clients who are right and must not notice.

Where `test_bad_input` asks that every field is refused by name, this asks what the server is like while it refuses: all
routes, every answer a 4xx in the envelope, the same process at the end, and three canaries whose sampled texts are
those that they get when they are alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests.support.harness import Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import VOCABULARY, tiny_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATION = (CHAT, COMPLETIONS)
GOOD = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
OTHER_ROUTES = ("/v1/models", "/v1/models/tiny", "/metrics", "/livez", "/readyz", "/startupz", "/health")
LEAK = re.compile(r"/usr|/root|/home|/tmp|/opt|site-packages|\.py\b|\b0x[0-9a-f]|Traceback|object at")


class Payload(NamedTuple):
    """A request that is wrong. `param` is the field that the answer has to name, None where there is none."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    param: str | None = None


def _with(path: str, fields: str) -> bytes:
    """A good body plus fields spelled as JSON by hand, since some of them are not what a JSON library writes."""
    return f"{json.dumps(GOOD[path])[:-1]}, {fields}}}".encode()


def _numbers() -> Iterator[Payload]:
    integers = ("n", "max_tokens", "min_tokens", "top_k")
    floats = (
        *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("timeout", "ttft_timeout"),
    )
    for path in GENERATION:
        for field in integers:
            too_large = () if field == "max_tokens" else ("9223372036854775808",)  # it is cut to what fits
            for number in ("-2147483649", *too_large, "1e308", '"1"', "true"):
                yield Payload("POST", path, _with(path, f'"{field}": {number}'), param=field)
        for field in floats:
            yield Payload("POST", path, _with(path, f'"{field}": -3'), param=field)
            for number in ("NaN", "-Infinity", "1e400"):  # no JSON, so there is no field yet
                yield Payload("POST", path, _with(path, f'"{field}": {number}'))
        yield Payload("POST", path, _with(path, '"n": 1000000'), param="n")
        yield Payload("POST", path, _with(path, '"seed": 9223372036854775808'), param="seed")
        yield Payload("POST", path, _with(path, '"priority": -9223372036854775808'), param="priority")


def _ids() -> Iterator[Payload]:
    for wrong in (-1, VOCABULARY, VOCABULARY + 1, 2**31, 2**63):
        for path in GENERATION:
            yield Payload("POST", path, _with(path, f'"stop_token_ids": [{wrong}]'), param="stop_token_ids")
            yield Payload("POST", path, _with(path, f'"logit_bias": {{"{wrong}": 1}}'), param="logit_bias")
        for prompt in ([wrong], [5, wrong], [[5], [5, wrong]]):
            yield Payload("POST", COMPLETIONS, json.dumps({"prompt": prompt}).encode(), param="prompt")


def _shapes() -> Iterator[Payload]:
    for path in GENERATION:
        for content in (
            *(b"", b"\0", b"\xff\xfe", b"null", b"[]", b'"a"', b"{", b"[" * 60_000, b'{"a":' * 60_000, b"9" * 60_000),
            b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}",
            b"--x\r\ncontent-disposition: form-data; name=prompt\r\n\r\na\r\n--x--",
        ):
            yield Payload("POST", path, content)
        yield Payload("POST", path, _with(path, f'"model": "{"x" * 100_000}"'), param="model")
        yield Payload("POST", path, _with(path, '"model": "../../etc/passwd"'), param="model")
        yield Payload("POST", path, _with(path, '"stop": [' + '"a",' * 50_000 + '"a"]'), param="stop")
        yield Payload(
            "POST", path, _with(path, '"logit_bias": ' + json.dumps(dict.fromkeys(range(5000), 1))), param="logit_bias"
        )
        yield Payload("POST", path, _with(path, '"stream_options": {}'), param="stream_options")
        yield Payload("POST", path, _with(path, '"response_format": {"type": "json"}'), param="response_format")
    prompts: list[Any] = ["", [], [[]], [""], ["a", []], {"a": 1}, [["a"]], [[[1]]]]
    for prompt in prompts:
        yield Payload("POST", COMPLETIONS, json.dumps({"prompt": prompt}).encode(), param="prompt")
    conversations: list[Any]
    conversations = [[], [[]], [{}], ["a"], [{"role": "user"}], [{"role": "root", "content": "a"}], {"0": "a"}]
    for messages in conversations:
        yield Payload("POST", CHAT, json.dumps({"messages": messages}).encode(), param="messages")
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        yield Payload(
            "POST", CHAT, _with(CHAT, f'"chat_template_kwargs": {{"{name}": []}}'), param="chat_template_kwargs"
        )
    yield Payload("POST", CHAT, _with(CHAT, '"chat_template": "{{ 1 }}"'), param="chat_template")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    yield Payload("POST", CHAT, json.dumps({"messages": image}).encode(), param="messages")


def _headers() -> Iterator[Payload]:
    for path in GENERATION:
        for encoding in ("gzip", "br", "deflate, gzip", "identity, gzip"):
            yield Payload("POST", path, json.dumps(GOOD[path]).encode(), {"content-encoding": encoding})
        for seconds in ("", "0", "-1", "nan", "inf", "soon", "1e999", "9" * 5000):
            headers = {"x-request-timeout": seconds}
            yield Payload("POST", path, json.dumps(GOOD[path]).encode(), headers, param="X-Request-Timeout")


def _routes() -> Iterator[Payload]:
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        yield from (Payload(method, path) for path in GENERATION)
    for method in ("POST", "DELETE", "BREW"):
        yield from (Payload(method, path) for path in OTHER_ROUTES)
    for path in (
        *("/docs/", "/openapi.yaml", "/v1", "/v1/", "/v1/completions/", "/v1//models", "/v1/models/nothing"),
        *("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/" + "a" * 5000),
        *("/v1/requests/unknown/timeline", "/v1/requests/%2e%2e/timeline", "/v1/requests//timeline"),
    ):
        yield Payload("GET", path)


CORPUS = [*_numbers(), *_ids(), *_shapes(), *_headers(), *_routes()]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server() as running:
        yield running.wait_ready()


def test_a_corpus_of_wrong_requests_is_refused_beside_canaries_that_do_not_notice(server: Server) -> None:
    assert len(CORPUS) >= 200
    before = server.wait_idle()
    start = before.samples["process_start_time_seconds"]
    complaints = []
    with canaries(server) as singing:
        for payload in CORPUS:
            answer = server.client.request(
                payload.method, payload.path, content=payload.content, headers=payload.headers
            )
            if complaint := _complaint(payload, answer.status_code, answer.text):
                complaints.append(
                    f"{payload.method} {payload.path} {payload.content[:80]!r} {payload.headers}: {complaint}"
                )
    assert not complaints, "\n".join(complaints)
    assert singing.songs >= len(singing.solo)

    after = server.wait_idle()
    assert after.samples["process_start_time_seconds"] == start, "it is the same process"
    assert after.finished["length"] - before.finished["length"] == singing.songs + len(singing.solo)
    assert after.finished | {"length": 0} == before.finished | {"length": 0}, "no wrong request was accepted"
    failed = {name: count for name, count in after.samples.items() if "status=5xx" in name}
    assert failed == {name: count for name, count in before.samples.items() if "status=5xx" in name}
    assert "Traceback" not in server.log


def _complaint(payload: Payload, status: int, text: str) -> str | None:
    """What is wrong with an answer to a wrong request."""
    if not 400 <= status < 500:
        return f"status {status}: {text[:200]}"
    try:
        error: dict[str, Any] = json.loads(text)["error"]
    except (ValueError, KeyError):
        return f"no envelope: {text[:200]}"
    if error.keys() != {"message", "type", "param", "code"} or not error["message"] or not error["type"]:
        return f"not the whole envelope: {text[:200]}"
    if payload.param is not None and not (error["param"] or "").startswith(payload.param):
        return f"names {error['param']!r} instead of {payload.param!r}: {text[:200]}"
    if LEAK.search(text.replace(payload.path[:200], "")):
        return f"tells more than it should: {text[:200]}"
    return None


class Canaries:
    """Streams that sample at a high temperature with fixed seeds: any other number in any step changes their texts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.songs = 0
        self.changed: list[tuple[str, str]] = []
        self.done = threading.Event()
        self.solo = [self._sing(seed) for seed in range(3)]

    def sing_on(self, seed: int) -> None:
        while True:
            song = self._sing(seed)
            self.songs += 1
            if song != self.solo[seed]:
                self.changed.append((self.solo[seed], song))
            if self.done.is_set():
                return

    def _sing(self, seed: int) -> str:
        body = {"prompt": "The canary", "max_tokens": 100, "ignore_eos": True, "seed": seed, "stream": True}
        with self._server.connect() as client:
            client.post(COMPLETIONS, body)
            assert client.read_head().status_code == 200
            events = [event for event in sse_events(client.chunks()) if isinstance(event, dict)]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def canaries(server: Server) -> Iterator[Canaries]:
    singing = Canaries(server)
    threads = [threading.Thread(target=singing.sing_on, args=(seed,)) for seed in range(len(singing.solo))]
    for thread in threads:
        thread.start()
    try:
        yield singing
    finally:
        singing.done.set()
        for thread in threads:
            thread.join()
    assert not singing.changed
