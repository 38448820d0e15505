"""Several servers as one: behind the shipped nginx.conf, or at one port. They come, go and die under load, and nobody
notices but the clients of one that was killed. Counted by request id, in the servers' own logs and in nginx's."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import pytest

from tests.integration.chaos.harness import ChaosServer, prompt_of
from tests.integration.chaos.load import WHOLE, Load, times_served
from tests.support.harness import TIMEOUT, free_port
from tests.support.nginx import DeployedNginx
from tests.support.raw_client import sse_events

Sharing = Literal["one socket", "SO_REUSEPORT"]
SHARED: list[tuple[Sharing, str]] = [("one socket", "uvloop"), ("SO_REUSEPORT", "uvloop")]
OTHERS: list[tuple[Sharing, str]] = [
    *(("one socket", "asyncio"), ("one socket", "trio")),
    *(("SO_REUSEPORT", "asyncio"), ("SO_REUSEPORT", "trio")),
]


class FleetServer(ChaosServer):
    """`headrace serve` at a port that it shares, by `listener` or by `reuse_port`."""

    def __init__(self, worker_class: str, port: int, listener: socket.socket | None = None, **settings: Any) -> None:
        sharing = {} if listener is not None else {"reuse_port": True}
        super().__init__(worker_class, "serve", device="simulated", **({"max_num_seqs": 16} | sharing | settings))
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.client.base_url = self.base_url  # where whoever has the port answers
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind("")  # the kernel picks an abstract name
        self._notified.settimeout(TIMEOUT)
        self.environment["NOTIFY_SOCKET"] = "@" + self._notified.getsockname()[1:].decode()
        self.descriptors = () if listener is None else (listener.fileno(),)

    def command(self) -> list[str]:
        command = super().command()
        return (
            ["tests.integration.chaos.with_listener", str(self.descriptors[0]), *command]
            if self.descriptors
            else command
        )

    def wait_notified(self, state: str) -> None:
        """Wait for a word to systemd."""
        while self._notified.recv(100).decode() != state:
            assert self._process is not None
            assert self._process.poll() is None, self.log

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._notified.close()


class Fleet:
    """Servers that are started and stopped one by one; a context manager that ends them all."""

    def __init__(self, worker_class: str = "uvloop", listener: socket.socket | None = None, **settings: Any) -> None:
        self._make = lambda port: FleetServer(worker_class, port, listener, **settings)
        self._stack = ExitStack()
        self.servers: list[FleetServer] = []  # all that there ever were

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        for server in self.servers:  # side by side
            server.send_signal(signal.SIGTERM)
        self._stack.__exit__(*exc_info)

    def start(self, *ports: int) -> list[FleetServer]:
        """More servers, side by side, because nearly all of their time is Python's imports. They are ready."""
        servers = [self._stack.enter_context(self._make(port)) for port in ports]
        self.servers += servers
        for server in servers:
            server.wait_notified("READY=1")
        return servers


# --- at one port


@contextmanager
def shared_port(sharing: Sharing) -> Iterator[tuple[int, socket.socket | None]]:
    if sharing == "SO_REUSEPORT":
        yield free_port(), None
    else:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            yield listener.getsockname()[1], listener


def restart_under_load(sharing: Sharing, worker_class: str, restarts: int, pause: int, at_once: int) -> None:
    """Two servers at one port, replaced in turn after `pause` requests each. `at_once` successors start together."""
    with shared_port(sharing) as (port, listener), Fleet(worker_class, listener) as fleet:
        living = fleet.start(port, port)
        with Load(port, worker_class) as load:
            for done in range(restarts):
                if done % at_once == 0:
                    living += fleet.start(*[port] * at_once)
                load.wait_for_more(pause)
                assert living.pop(0).stop() == 0
            load.wait_for_more(pause)
        assert not load.broken(), load.broken()
        served = times_served(fleet.servers, load.outcomes)
        assert served == dict.fromkeys(load.outcomes, 1)
        assert len({outcome.text for outcome in load.outcomes.values()}) > 1


@pytest.mark.parametrize(("sharing", "worker_class"), SHARED)
def test_restarts_at_one_port_lose_nothing(sharing: Sharing, worker_class: str) -> None:
    restart_under_load(sharing, worker_class, restarts=3, pause=50, at_once=3)


@pytest.mark.storm
@pytest.mark.parametrize(("sharing", "worker_class"), SHARED + OTHERS)
def test_twenty_restarts_at_one_port_lose_nothing(sharing: Sharing, worker_class: str) -> None:
    restart_under_load(sharing, worker_class, restarts=20, pause=200, at_once=1)


def test_a_port_that_is_shared_is_open_only_while_the_server_can_serve() -> None:
    with Fleet() as fleet:
        port = free_port()
        starting = FleetServer("uvloop", port)
        with starting:
            with pytest.raises(ConnectionRefusedError):
                starting.connect()
            starting.wait_notified("READY=1")
            stream = starting.stream("long", max_tokens=200)
            starting.faults.order("slow", seconds=0.01)
            stream.read_some()
            idle = starting.connect()
            (successor,) = fleet.start(port)
            starting.send_signal(signal.SIGTERM)
            starting.wait_notified("STOPPING=1")
            successor.poll(lambda: "Draining" in starting.log, bool)
            idle.post("/v1/completions", {"prompt": prompt_of("idle"), "max_tokens": 3}, {"x-request-id": "idle"})
            head = idle.read_head()
            assert head.status_code == 200, "the connection was there before the end was asked for"
            assert (b"connection", b"close") in head.headers
            assert stream.read().done
            assert starting.wait_exit() == 0
        assert times_served([starting], ["idle"]).keys() >= {"long", "idle"}
        assert successor.client.get("/readyz").status_code == 200


def test_the_end_while_the_model_is_loaded_opens_no_port() -> None:
    with FleetServer("uvloop", free_port()) as server:
        server.faults.order("hang")
        server.poll(lambda: server.log, bool)
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Listening at" not in server.log


# --- behind nginx


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


@pytest.fixture(scope="module")
def nginx(ports: list[int]) -> Iterator[DeployedNginx]:
    with DeployedNginx(ports) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(ports: list[int]) -> Iterator[Fleet]:
    with Fleet(max_body_bytes="16MiB") as running:
        running.start(*ports)
        yield running


def asked(nginx: DeployedNginx, at_least: Collection[str]) -> dict[str, list[str]]:
    """By request id, the ports that nginx has tried, in turn. It writes its line a moment after a request has ended:
    waits for those of these ids."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        tried: defaultdict[str, list[str]] = defaultdict(list)
        for line in nginx.access_log.splitlines():
            _, _, _, request_id, rest = line.partition('" ')[2].split(" ", 4)
            tried[request_id] += re.findall(r":(\d+)", rest)
        if tried.keys() >= set(at_least):
            return tried
        assert time.monotonic() < deadline, set(at_least) - tried.keys()
        time.sleep(0.1)


def test_servers_die_drain_and_come_and_only_who_was_at_the_dead_one_notices(
    nginx: DeployedNginx, fleet: Fleet, ports: list[int]
) -> None:
    first, second, third = fleet.servers
    for server in fleet.servers:
        server.faults.order("slow", seconds=0.003)
    with Load(nginx.port, "nginx", num_clients=12) as load:
        load.wait_for_more(100)
        first.kill()
        load.wait_for_more(100)
        assert second.stop() == 0
        load.wait_for_more(50)
        back = fleet.start(*ports[:2])
        for server in back:  # nginx leaves one alone for a while that was away
            server.poll(lambda server=server: times_served([server], []), bool, 0.1)  # type: ignore[misc]
        load.wait_for_more(100)
        assert third.stop() == 0
        load.wait_for_more(100)
    tried, broken = asked(nginx, load.outcomes), load.broken()
    at_the_dead = {request_id for request_id in load.outcomes if tried[request_id][-1] == str(ports[0])}
    assert broken.keys() <= at_the_dead, broken
    assert len(broken) <= load.num_clients, "those that the dead one had"
    served = times_served(fleet.servers, load.outcomes.keys() - at_the_dead)  # which could not log its last ones
    assert not broken.keys() & served.keys(), "nothing of it was asked again at another"
    assert max(served.values()) == 1
    gone_on = [request_id for request_id, where in tried.items() if len(where) > 1]
    assert gone_on, "who found a closed port went to the next"
    assert all(load.outcomes[request_id].ended == WHOLE for request_id in gone_on)
    by_back = times_served(back, [])
    assert by_back, "nginx has found those that came back"
    fleet.start(ports[2])


def test_a_conversation_stays_at_its_server_and_others_are_spread(
    nginx: DeployedNginx, fleet: Fleet, ports: list[int]
) -> None:
    def ask(request_id: str, **headers: str) -> None:
        with nginx.connect() as client:
            body = {"prompt": prompt_of(request_id), "max_tokens": 2}
            client.post("/v1/completions", body, {"x-request-id": request_id, **headers})
            assert client.read_head().status_code == 200
            client.read_body()

    def spread_over(name: str) -> set[str]:
        names = [f"{name}-{number}" for number in range(12)]
        for each in names:
            ask(each)
        return {asked(nginx, names)[each][-1] for each in names}

    rounds = itertools.count()  # a server that was away is not asked for a moment
    fleet.servers[-1].poll(lambda: spread_over(f"spread-{next(rounds)}"), set(map(str, ports)).__eq__, 1)
    sessions = [f"session-{number}" for number in range(24)]
    for number, name in enumerate(sessions):
        ask(name, **{"x-session-id": f"conversation-{number % 8}"})
    tried = asked(nginx, sessions)
    where = [{tried[name][-1] for name in sessions[first::8]} for first in range(8)]
    assert [len(servers) for servers in where] == [1] * 8
    assert len(set.union(*where)) > 1


def test_the_proxy_shows_what_is_for_clients_and_nothing_else(nginx: DeployedNginx, fleet: Fleet) -> None:
    def status(path: str) -> int:
        with nginx.connect() as client:
            client.get(path)
            return client.read_head().status_code

    assert status("/v1/models") == status("/health") == 200
    for path in (
        "/metrics",
        "/server_info",
        "/engine_state",
        "/dashboard",
        "/",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
    ):
        assert status(path) == 404, path
    for path in ("/reset_prefix_cache", "/abort_requests", "/configure_logging"):
        with nginx.connect() as client:
            client.post(path, {})
            assert client.read_head().status_code == 404


def test_the_proxy_passes_tokens_at_once_and_the_leaving_of_a_client(nginx: DeployedNginx, fleet: Fleet) -> None:
    def running() -> int:
        return sum(server.metrics().running for server in fleet.servers[-3:])

    server = fleet.servers[-1]
    client = nginx.connect()
    body = {"prompt": prompt_of("leaver"), "max_tokens": 8000, "ignore_eos": True, "stream": True}
    for living in fleet.servers[-3:]:
        living.faults.order("slow", seconds=0.02)
    client.post("/v1/completions", body)
    assert client.read_head().status_code == 200
    next(sse_events(client.chunks()))
    assert running() == 1, "the first token is here, and the last is far"
    client.leave_with_fin()
    server.poll(running, lambda count: count == 0)
