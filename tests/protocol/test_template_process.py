"""The processes that render templates which nobody has read: bounded, clean, replaced when they end, and never left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.child import ChildPool
from engine.errors import InvalidRequest
from protocol.chat_template import CHATML, ChatTemplate, ChatTemplateError, TemplateProcesses
from protocol.jinja_sandbox import Failure, RenderingFailed

pytestmark = pytest.mark.seconds

TIMEOUT = 60.0
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SWITCH = "{% if loop %}" + LOOP + "{% elif bomb %}{{ ('a' * bomb) | length }}{% else %}{{ text }}{% endif %}"


@contextmanager
def processes_of(source: str, timeout: float = TIMEOUT) -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses(source, timeout)
    try:
        yield processes
    finally:
        processes.close()


def children() -> set[int]:
    """The template processes of this one that have not been reaped."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        pids: list[str] = []
        with suppress(OSError):  # a thread that has just ended
            pids = (task / "children").read_text().split()
        for pid in pids:
            with suppress(OSError):  # a child that has
                if b"jinja_sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_busy(pid: int) -> bool:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) > 50  # ticks of the processor


BOMBS = {
    "a constant that the compiler folds": "{{ 'a' * 3000000000 }}",
    "a constant that takes long to fold": "{{ 3 ** 1000000000 }}",
    "a wide field": "{{ '{:3000000000}'.format(1) }}",
    "a nest of lists": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "a nest of loops": "{% for i in [1] %}" * 500 + "{% endfor %}" * 500,
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_is_a_bomb_to_the_compiler_is_refused(bomb: str) -> None:
    started: list[TemplateProcesses] = []

    def make_renderer(source: str) -> TemplateProcesses:
        started.append(TemplateProcesses(source, 1.0))
        return started[-1]

    with pytest.raises((ChatTemplateError, InvalidRequest), match="(does not parse|cannot be compiled|cannot render)"):
        ChatTemplate(BOMBS[bomb], {}, make_renderer=make_renderer).render([])  # if the compiler has put it off
    for processes in started:
        processes.close()
    assert not children()


@pytest.mark.slow
def test_a_rendering_that_takes_too_long_or_too_much_ends_its_process_and_the_next_one_starts_another() -> None:
    with processes_of(SWITCH, timeout=1.0) as processes:
        for wish, kind in (({"loop": True}, Failure.TIME), ({"bomb": 3 * 10**9}, Failure.MEMORY)):
            (before,) = children()
            with pytest.raises(RenderingFailed) as caught:
                processes.render(wish)
            assert caught.value.kind is kind
            assert not children()
            assert processes.render({"text": "a"}) == "a"
            assert before not in children()


def test_a_process_killed_between_two_renderings_is_replaced_unnoticed() -> None:
    with processes_of(SWITCH) as processes:
        (before,) = children()
        os.kill(before, signal.SIGKILL)
        assert processes.render({"text": "a"}) == "a"
        assert before not in children()


@pytest.mark.slow
def test_a_process_killed_twice_during_a_rendering_is_one_error() -> None:
    with processes_of(SWITCH) as processes:
        caught: list[RenderingFailed] = []

        def render() -> None:
            try:
                processes.render({"loop": True})
            except RenderingFailed as failure:
                caught.append(failure)

        rendering = threading.Thread(target=render)
        rendering.start()
        seen: set[int] = set()
        while rendering.is_alive():
            for pid in children() - seen:
                wait_for(partial(is_busy, pid))
                seen.add(pid)
                os.kill(pid, signal.SIGKILL)
        assert len(seen) == 2
        assert [failure.kind for failure in caught] == [Failure.GONE]
        assert processes.render({"text": "a"}) == "a"


@pytest.mark.slow
def test_closing_ends_a_rendering_and_leaves_nothing() -> None:
    processes = TemplateProcesses(SWITCH, TIMEOUT)
    failed = threading.Event()

    def render() -> None:
        with pytest.raises(RenderingFailed):
            processes.render({"loop": True})
        failed.set()

    rendering = threading.Thread(target=render)
    rendering.start()
    wait_for(lambda: any(map(is_busy, children())))
    processes.close()
    assert failed.wait(TIMEOUT)
    rendering.join()
    assert not children()
    with pytest.raises(RenderingFailed):
        processes.render({"text": "a"})


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_parent_that_is_killed_leaves_no_process(state: str) -> None:
    program = (
        "import sys; from protocol.chat_template import TemplateProcesses\n"
        f"processes = TemplateProcesses({SWITCH!r}, 600); print('there', flush=True)\n"
        "if sys.argv[1] == 'busy': processes.render({'loop': True})\n"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdout.readline()
    (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    if state == "busy":
        wait_for(lambda: is_busy(child))
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # nobody has it any more
            return True

    wait_for(has_ended)


def test_a_process_is_deaf_to_signals_for_the_group_and_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "a-secret")
    with processes_of(CHATML) as processes:
        (pid,) = children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert processes.render({"messages": [{"role": "user", "content": "a"}]})
        assert {pid} == children()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert {entry.partition(b"=")[0] for entry in environment.split(b"\0")} <= {b"", b"TZ", b"TZDIR", b"LC_CTYPE"}
        assert {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()} == {"0", "1", "2"}
        limits = Path(f"/proc/{pid}/limits").read_text()
        for name, limit in (
            ("address space", "1073741824"),
            ("processes", "0"),
            ("file size", "0"),
            ("open files", "16"),
        ):
            assert any(name in line and limit in line.split() for line in limits.splitlines()), limits


def test_a_pool_that_is_closed_while_processes_start_leaves_none() -> None:
    before = children()
    pool = ChildPool("protocol.jinja_sandbox", (), TIMEOUT)

    def start_many() -> None:
        with suppress(EOFError):
            while True:
                pool.start()

    threads = [threading.Thread(target=start_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(children() - before) >= 4)
    pool.close()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert children() <= before
    with pytest.raises(EOFError):
        pool.start()
