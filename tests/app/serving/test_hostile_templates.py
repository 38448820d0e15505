"""A chat template comes with the model's files, so it is foreign code: whatever it does, the server goes on.

One template does every kind of harm, whichever the message asks for. Its helper processes are those of the server's
process group that run `protocol.jinja_sandbox`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.selection import slow_except
from tests.support.harness import TIMEOUT, Server
from tests.support.tiny_model import tiny_server, write_tiny_model

CHAT = "/v1/chat/completions"
TEMPLATE_TIMEOUT = 2.0

HARM = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a string of gigabytes": "{{ ('a' * n * 10**9) | length }}",
    "a power": "{{ (n ** 1000000000) % 7 }}",
    "billion laughs": "{% set ns = namespace(x=['ha']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | string | length }}",
    "billion laughs compared": "{% set ns = namespace(x=['ha'], y=['ha']) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "billion laughs as JSON": "{% set ns = namespace(x=['ha']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | tojson | length }}",
    "a macro without end": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a wide field": "{{ '{:>3000000000}'.format(n) | length }}",
    "a flood": "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "a text of lipsum": "{{ lipsum(n=10**7, html=false) }}",
    "a long prompt": "{{ 'a ' * n * 10**6 }}",
}
TEMPLATE = (
    "{% set asked = messages[-1].content %}{% set n = 3 if asked else 1 %}"
    + "".join(f"{{% {'elif' if i else 'if'} asked == {name!r} %}}{HARM[name]}" for i, name in enumerate(HARM))
    + "{% else %}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("hostile") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with tiny_server(model=model, template_timeout=TEMPLATE_TIMEOUT) as server:
        yield server.wait_ready()


def ask(server: Server, content: str) -> httpx.Response:
    return server.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 2})


def helpers(server: Server) -> set[int]:
    """The template processes that live, zombies not counted."""
    assert server._process is not None
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and os.getpgid(int(entry.name)) == server._process.pid
            if ours and b"protocol.jinja_sandbox" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:  # it has just ended
            continue
    return found


def busy(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has just ended
        return False


@pytest.mark.slow
@pytest.mark.parametrize("harm", slow_except(HARM, "nested ranges", "billion laughs", "a flood"))
def test_a_template_that_does_harm_costs_its_request_and_nobody_else(server: Server, harm: str) -> None:
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(ask, server, harm)
        others = 0
        while not refused.done() or not others:
            assert server.client.get("/livez").status_code == 200
            assert server.complete("Hi", max_tokens=1)["choices"]
            others += 1
        answer = refused.result()
    assert answer.status_code == 400, answer.text  # which no client sends again by itself
    assert answer.json()["error"]["param"] == "messages"
    assert ask(server, "Hi").status_code == 200
    assert len(helpers(server)) <= 2


@pytest.mark.slow
def test_more_renderings_than_helpers_wait_for_their_turn_and_leave_none_behind(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: ask(server, "Hi" if n % 3 else "a string of gigabytes"), range(12)))
    assert [answer.status_code for answer in answers] == [200 if n % 3 else 400 for n in range(12)]
    assert len(helpers(server)) <= 2


@pytest.mark.slow
def test_clients_that_leave_do_not_pile_up_renderings(server: Server) -> None:
    def leave(_: int) -> None:
        with httpx.Client(base_url=server.base_url, timeout=0.2) as client, pytest.raises(httpx.TimeoutException):
            client.post(CHAT, json={"messages": [{"role": "user", "content": "nested ranges"}]})

    with ThreadPoolExecutor(8) as pool:
        most = 0
        left = [pool.submit(leave, n) for n in range(8)]
        while not all(each.done() for each in left):
            most = max(most, len(helpers(server)))
    for each in left:
        each.result()
    assert most <= 2
    assert ask(server, "Hi").status_code == 200


def test_a_helper_that_is_killed_between_requests_is_replaced_unnoticed(server: Server) -> None:
    assert ask(server, "Hi").status_code == 200
    before = helpers(server)
    assert before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    server.poll(lambda: before & helpers(server), lambda left: not left)
    assert ask(server, "Hi").status_code == 200
    assert not before & helpers(server)


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", slow_except(["asyncio", "trio"], "trio"))
def test_sigterm_ends_a_server_whose_template_loops(model: Path, worker_class: str) -> None:
    with tiny_server(worker_class, model=model, template_timeout=60, drain_timeout=0.1) as server:
        server.wait_ready()
        with ThreadPoolExecutor() as pool:
            looping = pool.submit(ask, server, "nested ranges")
            server.poll(lambda: helpers(server), lambda pids: any(map(busy, pids)))
            assert server.stop() == 0
            assert looping.result().status_code == 503
        assert not helpers(server)


@pytest.mark.slow
def test_a_helper_that_is_killed_is_replaced_once_and_a_killed_server_leaves_none(model: Path) -> None:
    with tiny_server(model=model, template_timeout=600) as server:
        server.wait_ready()
        with ThreadPoolExecutor() as pool:
            looping = pool.submit(ask, server, "nested ranges")
            killed: set[int] = set()

            def busy_helpers() -> set[int]:
                return set(filter(busy, helpers(server) - killed))

            for _ in range(2):
                found = server.poll(busy_helpers, bool)
                killed |= found
                for pid in found:
                    os.kill(pid, signal.SIGKILL)
            answer = looping.result()
            assert answer.status_code == 503, answer.text  # which clients send again
            assert answer.json()["error"]["code"] == "rendering_interrupted"
        with ThreadPoolExecutor() as pool:
            looping = pool.submit(ask, server, "nested ranges")
            server.poll(lambda: helpers(server), lambda pids: any(map(busy, pids)))
            assert server._process is not None
            server._process.kill()
            server._process.wait()
            with pytest.raises(httpx.TransportError):
                looping.result()
        deadline = time.monotonic() + TIMEOUT
        while helpers(server):
            assert time.monotonic() < deadline
            time.sleep(0.01)
