"""Admission by time, on the real scheduler and a virtual clock: what it expects comes true, and what it refuses would
have waited too long."""

from __future__ import annotations

import functools
import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from app.admission.admission import Admission, Limit, QueueTicket
from app.admission.tenants import ANONYMOUS, Tenant
from app.config.settings import Settings
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.costs.table import StepCostTable
from engine.plan import SchedulerOutput
from engine.simulation.counting import VirtualClock
from protocol.errors import ApiError
from tests.engine.helpers import make_request
from tests.engine.simulated_executor import SimulatedExecutor


@dataclass
class Client:
    """Sends a request, waits for its end, and sends the next."""

    name: str
    tenant: Tenant
    output_tokens: tuple[int, int]  # at least and at most
    max_tokens: bool = True  # whether it says so
    prompt_tokens: int = 50
    scope: ExitStack = field(default_factory=ExitStack)
    ticket: QueueTicket | None = None
    sent: float = 0.0
    number: int = 0
    length: int = 0
    next_try: float = 0.0
    expected: float | None = None
    has_begun: bool = False


class Server:
    """One engine behind its admission."""

    def __init__(
        self,
        *tenants: Tenant,
        slots: int = 8,
        max_queue_time: float = 30.0,
        seed: int = 1,
        table: StepCostTable | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock(1000.0)
        settings = Settings(max_num_seqs=slots, max_queue_time=max_queue_time)
        self.refused: list[Limit] = []
        self.waits: list[tuple[str, float, float]] = []  # tenant, truth, expectation
        self.admission = Admission(settings, self.refused.append, tenants or (ANONYMOUS,), clock=self.clock)
        self.speed = 1.0
        executor = SimulatedExecutor(20000, 16, 1000, cost=self._cost, clock=self.clock, sleep=self.clock.sleep)
        config = EngineConfig(max_model_len=4096, max_num_seqs=slots)
        self.core = EngineCore(config, executor, clock=self.clock, costs=table)
        if table is not None:
            self.admission.wait.set_costs(StepCostTable.from_json(table.to_json()))
        self.clients: list[Client] = []
        self.living: dict[str, Client] = {}

    def _cost(self, plan: SchedulerOutput) -> float:
        return (0.05 + 0.0005 * plan.total_num_scheduled_tokens) * self.speed if plan.request_ids else 0.0

    def send(self, client: Client) -> ApiError | None:
        client.length = length = self.random.randint(*client.output_tokens)
        try:
            client.ticket = client.scope.enter_context(
                self.admission.queue(
                    client.tenant, 1, client.prompt_tokens, None, length if client.max_tokens else None
                )
            )
        except ApiError as refusal:
            client.next_try = self.clock.now + int(refusal.headers["retry-after"])
            return refusal
        client.ticket.count_tokens(client.prompt_tokens)
        client.number += 1
        client.sent, client.has_begun = self.clock.now, False
        client.expected = client.ticket.expected
        if client.expected is not None:
            client.expected *= self.admission.wait.correction
        name = f"{client.name}-{client.number}"
        prompt = [hash(name) % 1000, *self.random.choices(range(1000), k=client.prompt_tokens - 1)]
        request = make_request(prompt, name, tenant=client.tenant.name, max_tokens=length, ignore_eos=True)
        self.core.add(replace(request, tenant_weight=client.tenant.weight))
        self.living[name] = client
        client.next_try = float("inf")
        return None

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            for client in self.clients:
                if client.next_try <= self.clock.now:
                    self.send(client)
            if not self.core.has_work:
                self.clock.now = min(end, min((each.next_try for each in self.clients), default=end))
                continue
            outputs = self.core.step()
            if outputs.stats.step_costs:
                self.admission.wait.set_costs(StepCostTable.from_json(outputs.stats.step_costs))
            for output in outputs.outputs:
                client = self.living[output.request_id]
                assert client.ticket is not None
                if output.new_token_ids and not client.has_begun:
                    client.has_begun = True
                    client.ticket.begin()
                    if client.expected is not None:
                        self.waits.append((client.tenant.name, self.clock.now - client.sent, client.expected))
                if output.finish_reason is not None:
                    client.ticket.end(client.length)
                    del self.living[output.request_id]
                    client.scope.close()
                    client.scope, client.next_try = ExitStack(), self.clock.now


def off(waits: list[tuple[str, float, float]]) -> float:
    """The median of how far expectations were off, of waits that were worth the name."""
    return statistics.median(abs(expected / truth - 1) for _, truth, expected in waits if truth > 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [True, False], ids=["told", "unknown"])
def test_of_200_clients_on_8_slots_it_knows_how_long_each_waits(max_tokens: bool) -> None:
    server = Server(max_queue_time=0)
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60), max_tokens) for n in range(200)]
    server.run(250)
    settled = server.waits[len(server.waits) // 3 :]
    waits = [truth for _, truth, _ in settled]
    assert 30 < statistics.median(waits) < 80, "it is a long queue"
    assert off(settled) < 0.15
    assert not server.refused


def test_whoever_would_wait_too_long_is_refused_and_told_when_not_to() -> None:
    server = Server(max_queue_time=15)
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60)) for n in range(200)]
    server.run(250)
    assert set(server.refused) == {Limit.TIME}
    last = server.waits[len(server.waits) // 3 :]
    waits = sorted(truth for _, truth, _ in last)
    assert waits[int(len(waits) * 0.9)] < 15 * 1.2
    assert statistics.median(waits) > 15 * 0.6, "no more are refused than have to be"
    assert server.core.scheduler.running, "and the engine has work"


def test_one_who_comes_when_told_is_let_in() -> None:
    server = Server(max_queue_time=10)
    server.clients = [Client(f"c{n}", ANONYMOUS, (100, 100)) for n in range(30)]
    server.run(60)
    many = [Client(f"m{n}", ANONYMOUS, (100, 100)) for n in range(200)]
    refusals = [refusal for each in many if (refusal := server.send(each)) is not None]
    assert refusals
    late = next(each for each in many if each.ticket is None)
    server.clients = []  # nobody else comes
    server.run(int(refusals[0].headers["retry-after"]))
    assert server.send(late) is None


def test_who_comes_back_when_told_is_served_about_as_often_as_who_asks_again_at_once() -> None:
    server = Server(max_queue_time=5)
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60)) for n in range(60)]
    server.run(300)
    assert server.refused
    served = sorted(client.number for client in server.clients)
    assert served[0] > served[30] / 3, served
    assert server.core.scheduler.running, "and the engine has work"


def test_a_tenant_without_a_queue_is_not_refused_for_anothers() -> None:
    flood, other = Tenant(name="flood"), Tenant(name="other")
    server = Server(flood, other, max_queue_time=10)
    server.clients = [Client(f"f{n}", flood, (50, 150)) for n in range(250)]
    server.run(100)
    assert server.refused
    num_refused = len(server.refused)
    server.clients += [Client(f"o{n}", other, (50, 150)) for n in range(2)]
    for each in server.clients:
        if each.tenant is flood and each.ticket is None:
            each.next_try = float("inf")
    before = len(server.refused)
    server.run(60)
    own = [(truth, expected) for tenant, truth, expected in server.waits if tenant == "other"]
    assert len(own) > 10
    assert max(truth for truth, _ in own) < 10
    assert statistics.median(expected for _, expected in own) < 3
    assert num_refused <= before


@pytest.mark.slow
@pytest.mark.parametrize("num_short", [2, 12], ids=["within its share", "with a queue"])
def test_a_tenants_long_answers_get_no_other_tenant_refused(num_short: int) -> None:
    long, short = Tenant(name="long"), Tenant(name="short")
    server = Server(long, short, max_queue_time=10)
    server.clients = [Client(f"l{n}", long, (1500, 2500), max_tokens=False) for n in range(20)]
    server.run(400)
    assert server.refused, "of its own"
    server.clients.append(Client("s0", short, (5, 15), max_tokens=False))
    server.run(20)
    server.clients += [Client(f"s{n}", short, (5, 15), max_tokens=False) for n in range(1, num_short)]
    refused: list[str] = []
    send = server.send

    def noted(client: Client) -> ApiError | None:
        refusal = send(client)
        if refusal is not None:
            refused.append(client.tenant.name)
        return refusal

    server.send = noted  # type: ignore[method-assign]
    server.run(300)
    waits = [truth for tenant, truth, _ in server.waits if tenant == "short"]
    assert len(waits) > 100
    assert max(waits) < 10
    assert "short" not in refused
    assert "long" in refused


def test_a_tenant_is_corrected_by_its_own_waits_and_by_those_of_all_as_long_as_it_has_none() -> None:
    server = Server(Tenant(name="slow"), Tenant(name="well"), Tenant(name="new"))
    wait = server.admission.wait
    for _ in range(20):
        wait.learn_wait(40.0, 10.0, "slow")
        wait.learn_wait(10.0, 10.0, "well")
    assert wait.correction_of("slow") > 3
    assert wait.correction_of("well") == pytest.approx(1)
    assert wait.correction_of("new") == wait.correction


def test_an_idle_server_and_one_that_has_just_started_refuse_nobody() -> None:
    server = Server(max_queue_time=0.001)
    server.clients = [Client(f"c{n}", ANONYMOUS, (5, 50)) for n in range(300)]
    for each in server.clients:
        assert server.send(each) is None, "nothing is known yet"
    server.run(200)
    server.clients = []
    server.run(100)
    assert server.refused, "later, with a queue"
    server.refused.clear()
    for n in range(8):
        assert server.send(Client(f"later{n}", ANONYMOUS, (500, 500))) is None
    assert server.send(Client("one more", ANONYMOUS, (5, 5))) is not None


def test_a_wrong_expectation_puts_itself_right() -> None:
    server = Server(max_queue_time=15)
    server.clients = [Client(f"c{n}", ANONYMOUS, (20, 200)) for n in range(100)]
    server.run(100)
    server.admission.wait.learn_wait(4000.0, 10.0)  # an engine that stood still
    assert server.admission.wait.correction > 3
    server.run(400)
    assert 0.7 < server.admission.wait.correction < 1.4
    assert off(server.waits[-100:]) < 0.2


@functools.cache
def learned() -> bytes:
    """The true table of a `Server`."""
    server = Server(max_queue_time=0)
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60), prompt_tokens=300) for n in range(40)]
    server.run(60)
    return server.core.costs.to_json()


def wrong_table(factor: float, from_tokens: int) -> StepCostTable:
    """The true table, wrong by a factor for steps of at least so many tokens of prompts, or a sixteenth as many of
    decodes."""
    table = StepCostTable.from_json(learned())
    for curve, first in ((table.decode, from_tokens / 16), (table.prefill, from_tokens), (table.mixed, from_tokens)):
        wrong = zip(curve.sizes, curve.seconds, strict=True)
        curve.seconds = [seconds * (factor if size >= first else 1.0) for size, seconds in wrong]
    if not from_tokens:
        table.decode_key *= factor
        table.prefill_key *= factor
    return table


def served_beside_40(server: Server) -> int:
    """Return the number of requests that start in 30 s, from the sixth second on."""
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60), prompt_tokens=300) for n in range(40)]
    server.run(5)
    before = sum(client.number for client in server.clients)
    server.run(30)
    return sum(client.number for client in server.clients) - before


@pytest.mark.parametrize(("factor", "from_tokens"), [(0.1, 0), (10, 0), (10, 32)], ids=["tenth", "tenfold", "step"])
def test_a_table_that_is_wrong_costs_no_throughput_and_refuses_nobody(factor: float, from_tokens: int) -> None:
    server, right = Server(max_queue_time=25, table=wrong_table(factor, from_tokens)), Server(table=wrong_table(1, 0))
    assert served_beside_40(server) > 0.8 * served_beside_40(right)
    assert max(truth for _, truth, _ in server.waits) < 20
    assert not server.refused, "all true waits are below the limit"


def test_a_machine_that_was_busy_for_a_while_refuses_nobody_afterwards() -> None:
    server = Server(max_queue_time=25)
    server.clients = [Client(f"c{n}", ANONYMOUS, (10, 60), prompt_tokens=300) for n in range(40)]
    server.run(40)
    server.speed = 10.0
    server.run(50)
    assert server.refused, "some were expected to wait a minute, and would have"
    server.speed = 1.0
    server.run(10)
    server.refused.clear()
    server.run(30)
    assert not server.refused
