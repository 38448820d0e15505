"""Whatever a client sends, the answer is a 4xx in the envelope that names the field, and the server serves on.

Each entry of the corpus is a change to a request that would work, and the field that the error has to name.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.support.harness import Server

PROMPT = "marzipan-unicorn"  # must not come back in an error
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
COMPLETION = {"prompt": PROMPT, "max_tokens": 1}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

HUGE = 2**62
BEYOND = 10**30  # of what 64 bits hold: a JSON parser may make a float of it
VOCABULARY = 49152
CONTEXT = 4096  # the server's max_model_len

# field, bad values, and a word that tells the limit or what is allowed ("" where naming the field says it all)
SHARED: list[tuple[str, list[Any], str]] = [
    ("model", [1, ["a"], {}, True], "string"),
    ("n", [0, -1, 129, HUGE, -HUGE], "128"),
    ("n", ["2", 1.5, True, [2], BEYOND, -BEYOND], "integer"),
    ("temperature", [-0.1, 2.1, -HUGE, HUGE, BEYOND], "2"),
    ("temperature", ["1", True, [1]], "number"),
    ("top_p", [0, -1, 1.1, HUGE], "1"),
    ("top_p", ["1", {}], "number"),
    ("top_k", [-2, HUGE], ""),
    ("top_k", ["5", 1.5], "integer"),
    ("min_p", [-0.1, 1.1], "1"),
    ("frequency_penalty", [-2.1, 2.1, "1"], ""),
    ("presence_penalty", [-2.1, 2.1, "1"], ""),
    ("repetition_penalty", [0, -1, "1"], ""),
    ("max_tokens", [0, -2, -HUGE], "at least 1, or -1"),
    ("max_tokens", ["5", 1.5, [5], True, BEYOND, -BEYOND], "integer"),
    ("min_tokens", [-1, 2, HUGE], ""),
    ("min_tokens", ["1"], "integer"),
    ("seed", [2**63, BEYOND, -BEYOND], ""),
    ("seed", ["1", 1.5], "integer"),
    ("stop", [1, {}, True], "string"),
    ("stop", ["", ["a", ""]], "empty"),
    ("stop", [["a"] * 17], "16"),
    ("stop_token_ids", [[-1], [VOCABULARY], [HUGE]], str(VOCABULARY - 1)),
    ("stop_token_ids", [[0] * 129], "128"),
    ("stop_token_ids", [5, "5"], "array"),
    ("stop_token_ids", [[BEYOND], ["5"], [1.5]], "integer"),
    ("logit_bias", [{"0": 101}, {"0": -101}], "100"),
    ("logit_bias", [{str(VOCABULARY): 1}], str(VOCABULARY - 1)),
    ("logit_bias", [{"x": 1}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"9" * 400: 1}], ""),
    ("logit_bias", [[], "a", {str(token_id): 1 for token_id in range(1025)}], ""),
    ("stream", ["true", 1, "yes"], "true or false"),
    ("stream_options", [{"include_usage": True}], "stream"),
    ("ignore_eos", ["true", 1], "true or false"),
    ("priority", ["1", 1.5, HUGE, -HUGE], ""),
    ("prompt_logprobs", [-2, 21, HUGE], ""),
    ("echo", ["true", 1], "true or false"),
    ("truncate_prompt_tokens", [-2, 0, CONTEXT + 1, HUGE], ""),
    ("cache_salt", ["", "a@b", "a/b", "a\\b", "a\0b", "a" * 129], "text that matches"),
    ("response_format", [{}, {"type": "xml"}, {"type": "json_schema"}, "json_object"], ""),
    ("structured_outputs", [{}, {"regex": "a", "choice": ["a"]}, {"json": 5}], ""),
    ("guided_json", [{"not": {}}, "{", 1], ""),
    ("guided_regex", ["(", 5, "(?=a)"], ""),
    ("guided_choice", [[], [""], "a", [1]], ""),
    ("guided_grammar", ["start: a", "root ::= a", 1], ""),
    ("use_beam_search", [True], "not supported"),
]
CHAT_ONLY: list[tuple[str, list[Any], str]] = [
    ("messages", [None, [], "hello", {}, 1], ""),
    ("messages.0", ["hello", 1, []], "object"),
    ("messages.0.role", ["robot", 1, None], ""),
    ("messages.0.content", [1, {}, None, True], ""),
    ("messages.0.content.0.type", ["image_url", "input_audio"], ""),
    ("max_completion_tokens", [0, -2], "at least 1, or -1"),
    ("max_completion_tokens", ["5"], "integer"),
    ("logprobs", [1, "true", 5], "true or false"),
    ("top_logprobs", [-2, 21, HUGE], "20"),
    ("tools", [["f"], [{"type": "function", "function": {"name": "f f"}}]], ""),
    ("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}], "tools"),
    ("functions", [["f"], [{"name": "f f"}]], ""),
    ("reasoning_effort", ["enormous"], "medium"),
    ("chat_template", ["{{ 1 }}"], "not supported"),
    ("chat_template_kwargs", ["a", []], "object"),
    ("chat_template_kwargs", [{"strftime_now": 1}], "may not be set"),
]
COMPLETION_ONLY: list[tuple[str, list[Any], str]] = [
    ("prompt", [None, "", [], [""], [[]], ["a", ""]], ""),
    ("prompt", [1, True, {}, 1.5], "string"),
    ("prompt", [[BEYOND], [1, BEYOND], [1.5]], "integer"),
    ("prompt", [["a"] * 1025], "1024"),
    ("prompt", [[-1], [VOCABULARY], [[1], [VOCABULARY]], [HUGE]], str(VOCABULARY - 1)),
    ("prompt", [[1] * CONTEXT, [1] * (CONTEXT + 1), "word " * CONTEXT], str(CONTEXT)),
    ("logprobs", [-2, 21, HUGE], "20"),
    ("logprobs", ["1", True], "integer"),
    ("suffix", ["x"], "not supported"),
    ("best_of", [3], "n (1)"),
]


def _changes(field: str, value: Any) -> dict[str, Any]:
    """The fields to put into a body so that `field`, which may be a path into its messages, has this value."""
    if field == "top_logprobs":
        return {"logprobs": True, field: value}
    match field.split("."):
        case [name]:
            return {name: value}
        case ["messages", "0"]:
            return {"messages": [value]}
        case ["messages", "0", name]:
            return {"messages": [{"role": "user", "content": PROMPT, name: value}]}
        case _:
            return {"messages": [{"role": "user", "content": [{"type": value, "text": PROMPT}]}]}


CORPUS = [
    pytest.param(path, field, BODIES[path] | _changes(field, value), word, id=f"{path[4:8]}-{field}={str(value)[:24]}")
    for path, entries in [
        ("/v1/chat/completions", SHARED + CHAT_ONLY),
        ("/v1/completions", SHARED + COMPLETION_ONLY),
    ]
    for field, values, word in entries
    for value in values
]


def check_refusal(status: int, text: str) -> dict[str, Any]:
    assert 400 <= status < 500, text
    error = json.loads(text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"]
    assert not re.search(r"/usr|/root|/home|/work|site-packages|\.py\b|0x[0-9a-f]|Traceback", text), text
    assert PROMPT not in text, "prompt text does not come back"
    assert len(error["message"]) < 1000
    return error


@pytest.mark.parametrize(("path", "field", "body", "word"), CORPUS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_field_is_refused_by_name(
    server: Server, path: str, field: str, body: dict[str, Any], word: str, stream: bool
) -> None:
    """Streamed or not alike: plain JSON, because nothing has been streamed yet."""
    if field in ("stream", "stream_options"):
        stream = False
    answer = server.post(path, ({"stream": True} if stream else {}) | body)
    error = check_refusal(answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    assert error["param"].startswith(field)
    assert word in error["message"]
    assert field.rsplit(".", maxsplit=1)[-1] in error["message"] or str(CONTEXT) in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b'{"prompt": "marzipan-unicorn", }',
        b'{"prompt": "marzipan-unicorn"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"[]",
        b'["marzipan-unicorn"]',
        b'"marzipan-unicorn"',
        b"1",
        b"null",
        b"true",
        b"\x00" * 100,
        b"prompt=marzipan-unicorn&max_tokens=1",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_body_that_is_no_json_object_is_refused(server: Server, path: str, content: bytes) -> None:
    answer = server.client.post(path, content=content)
    check_refusal(answer.status_code, answer.text)


@pytest.mark.parametrize("path", BODIES)
def test_number_that_json_cannot_hold_is_refused_wherever_it_stands(server: Server, path: str) -> None:
    for field in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
        for number in ("1e400", "-1e400"):
            content = json.dumps(BODIES[path])[:-1] + f', "{field}": {number}}}'
            answer = server.client.post(path, content=content.encode())
            check_refusal(answer.status_code, answer.text)


def test_over_long_prompts_say_the_limit_in_the_words_that_clients_look_for(server: Server) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "word " * 6000},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 6000}]},
    }
    for path, body in bodies.items():
        answer = server.post(path, body)
        error = check_refusal(answer.status_code, answer.text)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert error["param"] in ("prompt", "messages")


def test_unknown_model_is_404_and_never_generated_for(server: Server) -> None:
    before = server.wait_idle()
    for path, body in BODIES.items():
        answer = server.post(path, body | {"model": "gpt-4o"})
        assert answer.status_code == 404
        assert check_refusal(answer.status_code, answer.text)["code"] == "model_not_found"
    assert server.metrics().finished == before.finished


def test_the_log_names_the_field_that_was_refused_and_nothing_that_the_client_made_up(server: Server) -> None:
    made_up = "Sec-ret"
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 3}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
        ({"logit_bias": {made_up: 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"messages": made_up}}, "chat_template_kwargs.messages"),
    ]

    def lines_with(text: str) -> list[str]:
        return [line for line in server.log.splitlines() if text in line]

    for number, (fields, param) in enumerate(bodies):
        request_id = f"refused-{number}"
        body = {**BODIES["/v1/chat/completions"], **fields}
        assert server.post("/v1/chat/completions", body, **{"x-request-id": request_id}).status_code == 400
        (line,) = server.poll(partial(lines_with, f'"{request_id}"'), bool)
        assert json.loads(line)["param"] == param
    assert made_up not in server.log


def test_nulls_and_unknown_fields_are_no_mistakes(server: Server) -> None:
    nulls = dict.fromkeys(["temperature", "n", "stop", "seed", "logit_bias", "stream", "tools", "response_format"])
    ignored = {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "field_of_next_year": [1]}
    for path, body in BODIES.items():
        answer = server.post(path, body | nulls | ignored)
        assert answer.status_code == 200, answer.text


def test_a_refusal_among_several_prompts_runs_none_of_them(server: Server) -> None:
    before = server.wait_idle()
    answer = server.post("/v1/completions", {"prompt": [[1, 2], [VOCABULARY]], "max_tokens": 1})
    assert answer.status_code == 400
    answer = server.post("/v1/completions", {"prompt": ["short", "word " * 6000], "max_tokens": 1})
    assert answer.status_code == 400
    assert server.wait_idle().computed_tokens == before.computed_tokens


def test_bytes_that_are_no_http_close_that_connection_and_nothing_else(server: Server) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"\x00" * 1000,
        b"A" * 200_000,
        b"GET / HTTP/9\r\n\r\n",
    ):
        with server.connect() as client:
            with suppress(ConnectionError):  # it may be closed before all is sent
                client.send_bytes(garbage)
            client.leave_with_fin()
    assert server.complete("The sea", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_after_all_of_this_nothing_is_left_and_no_request_failed_inside(server: Server) -> None:
    for path, body in BODIES.items():
        assert server.post(path, body).status_code == 200
    now = server.wait_idle()
    assert now.finished["error"] == 0
    assert "Traceback" not in server.log
    assert PROMPT not in server.log, "prompt text is not logged"
