"""A client that leaves while its long prompt is turned into tokens, which happens on a worker thread."""

from __future__ import annotations

import itertools

import pytest

from tests.app.http.test_client_gone import LEAVING
from tests.selection import slow_except
from tests.support.harness import Server
from tests.support.victims import PATH

PLACES = 16  # in the queue of `narrow_tiny_server`
LONG_PROMPTS = 3  # one after the other, so that the first is still at it when readiness has been asked
LONG_PROMPT = "Ten words that are all different in their ways here. " * 6_000  # 318,000 characters

_CASES = list(itertools.product([True, False], LEAVING, [1, 4]))
_QUICK = [(True, "rst", 1), (False, "fin", 4)]


def _name(value: object) -> str:
    return {True: "stream", False: "whole"}[value] if isinstance(value, bool) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "how", "n"), slow_except(_CASES, *_QUICK), ids=_name)
@pytest.mark.parametrize("narrow_tiny_server", ["uvloop"], indirect=True, scope="session")
def test_client_gone_while_its_prompt_is_tokenized_leaves_nothing_and_is_never_prefilled(
    narrow_tiny_server: Server, stream: bool, how: str, n: int
) -> None:
    check_gone_while_tokenizing(narrow_tiny_server, stream, how, n)


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "how", "n"), _QUICK, ids=_name)
@pytest.mark.parametrize("narrow_tiny_server", slow_except(["asyncio", "trio"], "trio"), indirect=True, scope="session")
def test_client_gone_while_tokenizing_is_noticed_on_every_event_loop(
    narrow_tiny_server: Server, stream: bool, how: str, n: int
) -> None:
    check_gone_while_tokenizing(narrow_tiny_server, stream, how, n)


def check_gone_while_tokenizing(server: Server, stream: bool, how: str, n: int) -> None:
    before = server.wait_idle()
    victim = server.connect()
    # It takes every place in the queue, so that readiness tells from outside when it is there and when it is gone.
    prompts = [LONG_PROMPT] * LONG_PROMPTS + ["short"] * (PLACES // n - LONG_PROMPTS)
    victim.post(PATH, {"prompt": prompts, "n": n, "stream": stream})
    server.poll(lambda: server.client.get("/readyz").status_code, lambda status: status == 503)
    LEAVING[how](victim)
    server.poll(lambda: server.client.get("/readyz").status_code, lambda status: status == 200)

    # A prompt longer than the context, refused once it is counted: its thread ends later than the victim's.
    refused = server.post(PATH, {"prompt": LONG_PROMPT * 5})
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]["message"]

    # The victim's request is counted when its handler ends, which may be later than what it held is given back.
    after = server.wait_until(lambda now: now.http_requests(PATH, "4xx") >= before.http_requests(PATH, "4xx") + 2)
    assert after.http_requests(PATH, "4xx") == before.http_requests(PATH, "4xx") + 2
    after = server.wait_idle()
    assert after.computed_tokens == before.computed_tokens
    assert after.finished == before.finished, "it was never accepted"
