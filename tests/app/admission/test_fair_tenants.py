"""One tenant asks for all there is and calls all of it urgent; the others are served as if it were one of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.harness import Server
from tests.support.tenants import COMPLETIONS, ask, connect, tenant_server
from tests.support.tiny_model import CONTEXT, tiny_server

SLOTS, PLACES, TIMELINES = 2, 12, 10
RESERVE = 2  # of the places, for each of three tenants
FILE = """
[tenants.flood]
keys = ["flood"]

[tenants.guest]
keys = ["guest"]

[tenants.first]
keys = ["first"]
priority_over_others = true
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings: dict[str, Any] = {"max_num_seqs": SLOTS, "max_queued_requests": PLACES, "timeline_size": TIMELINES}
    with tenant_server(tiny_server, tmp_path_factory.mktemp("fair"), FILE, "guest", **settings) as running:
        yield running


def served_of_sixty(server: Server, *askers: tuple[str, int]) -> Counter[str]:
    """Whose the first sixty answers are when each of these connections, by key and priority, asks again and again."""
    served: Counter[str] = Counter()
    enough = threading.Event()

    def keep_asking(key: str, priority: int) -> None:
        body = {"prompt": "Hi", "max_tokens": 30, "ignore_eos": True, "priority": priority}
        with httpx.Client(timeout=60, trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:
            while not enough.is_set():
                assert client.post(f"{server.base_url}{COMPLETIONS}", json=body).status_code == 200
                if not enough.is_set():
                    served[key] += 1
                if served.total() >= 60:
                    enough.set()

    threads = [threading.Thread(target=keep_asking, args=asker, daemon=True) for asker in askers]
    for thread in threads:
        thread.start()
    assert enough.wait(60), served
    for thread in threads:
        thread.join(60)
    return served


@pytest.mark.slow
def test_six_urgent_connections_of_one_key_starve_no_other_key(server: Server) -> None:
    served = served_of_sixty(server, *[("flood", -1000)] * 6, *[("guest", 0)] * 2)
    assert served["guest"] >= 12, served  # half of sixty, less what others are served between an answer and the next


@pytest.mark.slow
def test_a_tenant_with_the_right_goes_first_across_tenants(server: Server) -> None:
    served = served_of_sixty(server, *[("first", -1)] * 6, *[("guest", -1000)] * 2)
    assert served["guest"] < 12, served


@pytest.mark.slow
def test_a_tenant_that_floods_the_queue_leaves_others_their_places(server: Server) -> None:
    server.wait_idle()
    with ExitStack() as stack:
        for _ in range(SLOTS):
            connect(server, stack, "flood", max_tokens=CONTEXT - 10)
        server.wait_until(lambda now: now.running == SLOTS and now.generation_tokens > 0)
        for _ in range(PLACES):
            connect(server, stack, "flood", max_tokens=CONTEXT - 10)
        server.wait_until(lambda now: now.waiting == PLACES - 2 * RESERVE)
        refused = ask(server, "flood")
        assert refused.status_code == 429
        assert f"{2 * RESERVE} are kept for other tenants" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/readyz").status_code == 200, "others would be accepted"
        assert ask(server, "guest", n=RESERVE).status_code == 200
        assert ask(server, "first", n=RESERVE).status_code == 200
        assert server.metrics().waiting >= PLACES - 2 * RESERVE, "the flood is still there"
    server.wait_idle()


def test_choices_hold_their_places_until_they_begin_themselves(server: Server) -> None:
    """Else a request that asks for many would let the next one in with its first token, and that one the next."""
    server.wait_idle()
    with ExitStack() as stack:
        many = connect(server, stack, "flood", n=PLACES - 2 * RESERVE, max_tokens=CONTEXT - 10, stream=True)
        many.read_head()
        next(many.chunks())
        server.wait_until(lambda now: now.running == SLOTS and now.waiting == PLACES - 2 * RESERVE - SLOTS)
        more = connect(server, stack, "flood", n=SLOTS + 1)
        assert more.read_head().status_code == 429
    server.wait_idle()


def test_who_uses_anothers_request_id_reaches_neither_its_answer_nor_its_timeline(server: Server) -> None:
    server.wait_idle()
    expected = ask(server, "guest", max_tokens=400, seed=1, request_id="mine").json()["choices"]
    with ExitStack() as stack:
        client = stack.enter_context(server.connect())
        body = {"prompt": "Hi", "max_tokens": 400, "seed": 1, "ignore_eos": True}
        client.post(COMPLETIONS, body, {"authorization": "Bearer guest", "x-request-id": "mine"})
        server.wait_until(lambda now: now.running == 1)
        for _ in range(3):
            same = stack.enter_context(server.connect())
            same.post(COMPLETIONS, body, {"authorization": "Bearer flood", "x-request-id": "mine"})
            same.leave_with_rst()
        assert client.read_head().status_code == 200
        assert httpx.Response(200, content=client.read_body()).json()["choices"] == expected
    for _ in range(TIMELINES + 5):
        assert ask(server, "flood", request_id="").status_code == 200
    timeline = server.client.get("/v1/requests/mine/timeline")
    assert timeline.status_code == 200, "a flood pushes out its own"
    assert timeline.json()["output_tokens"] == 400
