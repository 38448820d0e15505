"""A tokenizer comes with the model's files, and its regexes are foreign code: one may take seconds for a short text,
and no thread can be stopped in it. The server and its deadlines go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.app.http.test_deadlines import check_expired
from tests.support.harness import Server
from tests.support.tiny_model import tiny_server, write_tiny_model

CHAT = "/v1/chat/completions"
# Below the library's own limit: it looks at every way to cut a run of letters in three, from each of them.
SLOW_PATTERN = r"[a-z]*[a-w]*[a-v]*\d"
SLOW_TEXT = "a" * 220
CHATTY = [{"role": "user", "content": SLOW_TEXT}]


@pytest.fixture(scope="module", params=["uvloop"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_tiny_model(tmp_path_factory.mktemp("hostile") / "model")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": SLOW_PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer))
    with tiny_server(request.param, model=directory) as server:
        yield server.wait_ready()


@pytest.mark.slow
def test_a_regex_that_takes_long_for_a_short_text_stops_nobody_else_and_no_deadline(server: Server) -> None:
    body = {"messages": CHATTY}
    with ThreadPoolExecutor(4) as pool:
        whole = pool.submit(server.post, CHAT, body | {"max_tokens": 1})
        expired = pool.submit(server.post, CHAT, body | {"max_tokens": 1, "timeout": 0.05})
        answers = 0
        while not expired.done():
            assert server.client.get("/livez").status_code == 200
            answers += 1
        check_expired(expired.result())
        assert not whole.done(), "the deadline waited for the thread"
        while not whole.done():
            assert server.client.get("/livez").status_code == 200
            answers += 1
        assert whole.result().status_code == 200
    assert answers >= 10, "the event loop was held"
