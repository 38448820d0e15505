"""A step that fails ends only the requests at fault; everybody else reads what they would have read anyway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.chaos.faulty import Kind
from tests.integration.chaos.harness import ChaosServer, Stream, prompt_of
from tests.support.harness import Metrics

TOKENS = 40
NEIGHBOURS = [f"near-{number}" for number in range(7)]


@pytest.fixture(scope="module")
def server() -> Iterator[ChaosServer]:
    with ChaosServer("uvloop") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def texts(server: ChaosServer) -> dict[str, str]:
    """What the neighbours read when each is alone."""
    return {name: server.text_alone(name, TOKENS) for name in NEIGHBOURS}


@pytest.fixture
def before(server: ChaosServer, texts: dict[str, str]) -> Iterator[Metrics]:
    yield server.wait_idle()
    server.faults.clear()


def start_neighbours(server: ChaosServer) -> list[Stream]:
    return [server.stream(name, max_tokens=TOKENS) for name in NEIGHBOURS]


def check_neighbours(neighbours: list[Stream], texts: dict[str, str]) -> None:
    for neighbour in neighbours:
        neighbour.read()
        assert neighbour.done
        assert neighbour.error is None
    assert {neighbour.name: neighbour.text for neighbour in neighbours} == texts


def check_accounting(server: ChaosServer, before: Metrics, *, errors: int, others: int) -> None:
    """Nothing is left over, and every end was counted as what it was."""
    after = server.wait_idle()
    counted = {reason: count - before.finished[reason] for reason, count in after.finished.items()}
    assert {reason: count for reason, count in counted.items() if count} == {
        reason: count for reason, count in {"error": errors, "length": others}.items() if count
    }


def check_failed(server: ChaosServer, name: str) -> None:
    assert any(name in line and '"level": "error"' in line for line in server.log.splitlines()), "the log names it"


@pytest.mark.parametrize("kind", ["error", "memory", "nan"])
class TestOneRequestAtFault:
    def test_before_its_first_byte_it_gets_a_plain_500(
        self, server: ChaosServer, texts: dict[str, str], before: Metrics, kind: Kind
    ) -> None:
        name = f"bad-{kind}-first"
        server.faults.order(kind, request=name)
        neighbours = start_neighbours(server)
        whole = server.post("/v1/completions", {"prompt": prompt_of(name)}, **{"x-request-id": name})
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "server_error"
        assert whole.json()["error"]["code"] == "request_failed"
        assert "fault" not in whole.text, "what the exception says stays in the server"
        streamed = server.stream(name).read()
        assert streamed.error == whole.json()["error"]
        assert server.complete(prompt_of("next"), max_tokens=1), "the next request is served"

        check_neighbours(neighbours, texts)
        check_accounting(server, before, errors=2, others=len(neighbours) + 1)
        check_failed(server, name)

    def test_after_its_first_byte_it_gets_an_error_frame(
        self, server: ChaosServer, texts: dict[str, str], before: Metrics, kind: Kind
    ) -> None:
        name = f"bad-{kind}-later"
        victim = server.stream(name, max_tokens=4000).read_some()
        neighbours = start_neighbours(server)
        server.faults.order(kind, request=name)
        victim.read()
        assert victim.status == 200
        assert victim.done, "a stream that fails is ended like any other"
        assert victim.error is not None
        assert victim.error["code"] == "request_failed"

        check_neighbours(neighbours, texts)
        check_accounting(server, before, errors=1, others=len(neighbours))
        check_failed(server, name)

    def test_several_at_fault_are_all_found(
        self, server: ChaosServer, texts: dict[str, str], before: Metrics, kind: Kind
    ) -> None:
        name = f"bad-{kind}-many"
        server.faults.order(kind, request=name)
        victims = [server.stream(f"{name}-{number}") for number in range(3)]
        neighbours = start_neighbours(server)
        for victim in victims:
            assert victim.read().error is not None
        check_neighbours(neighbours, texts)
        check_accounting(server, before, errors=3, others=len(neighbours))
        for victim in victims:
            check_failed(server, victim.name)


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_step_that_fails_once_ends_nobody(
    server: ChaosServer, texts: dict[str, str], before: Metrics, kind: Kind
) -> None:
    neighbours = start_neighbours(server)
    neighbours[0].read_some()
    server.faults.order(kind, times=1)
    check_neighbours(neighbours, texts)
    check_accounting(server, before, errors=0, others=len(neighbours))


def test_memory_that_suffices_for_three_serves_seven(
    server: ChaosServer, texts: dict[str, str], before: Metrics
) -> None:
    server.faults.order("memory", more_than=3)
    check_neighbours(start_neighbours(server), texts)
    check_accounting(server, before, errors=0, others=len(NEIGHBOURS))


def test_one_choice_at_fault_ends_its_request_and_no_other(
    server: ChaosServer, texts: dict[str, str], before: Metrics
) -> None:
    """The choices of a request are one scope, so the siblings end with it."""
    neighbours = start_neighbours(server)
    victim = server.stream("bad-siblings", n=4, max_tokens=4000).read_some()
    server.faults.order("nan", request="bad-siblings", times=1)
    victim.read()
    assert victim.done
    assert victim.error is not None
    check_neighbours(neighbours, texts)
    check_accounting(server, before, errors=1, others=len(neighbours))
