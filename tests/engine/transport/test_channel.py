"""The way across the thread boundary: nothing waits, nothing is lost, and the loop is woken as little as can be."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import anyio
import pytest

from engine.commands import AddRequests, Close, Event, FinishRequests
from engine.messages import EngineReady, FinishReason
from engine.transport.channel import RequestChannel
from tests.engine.helpers import count_wake_ups, make_request, until

pytestmark = pytest.mark.anyio


def message(number: int) -> EngineReady:
    return EngineReady(vocab_size=number, num_blocks=1, block_size=1, max_model_len=1)


def send_from_thread(channel: RequestChannel, messages: list[Event]) -> None:
    def send() -> None:
        for each in messages:
            channel.send(each)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()  # the loop does not run meanwhile: it is as busy as can be


async def test_messages_arrive_on_the_loop_once_and_in_order() -> None:
    received: list[Event] = []
    threads: set[int] = set()

    def deliver(messages: list[Event]) -> None:
        received.extend(messages)
        threads.add(threading.get_ident())

    def has_received(count: int) -> bool:
        return len(received) == count

    channel = RequestChannel(deliver)
    messages: list[Event] = [message(number) for number in range(100)]
    for start in range(0, 100, 10):
        send_from_thread(channel, messages[start : start + 10])
        await until(partial(has_received, start + 10))
    assert received == messages
    assert threads == {threading.get_ident()}


async def test_a_busy_loop_is_woken_once_for_all_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = count_wake_ups(monkeypatch)
    received: list[Event] = []
    channel = RequestChannel(received.extend)
    send_from_thread(channel, [message(number) for number in range(50)])
    assert len(wake_ups) == 1
    await until(lambda: len(received) == 50)
    send_from_thread(channel, [message(50)])
    await until(lambda: len(received) == 51)
    assert len(wake_ups) == 2


async def test_the_inbox_keeps_order_and_is_drained_at_once() -> None:
    channel = RequestChannel(lambda _: None)
    request, end, close = AddRequests.of([make_request([1])]), FinishRequests(["a"], FinishReason.ABORT), Close()
    assert channel.receive(wait=False) == []
    for each in (end, request, end, close):
        channel.put(each)
    assert channel.receive(wait=True) == [end, request, end, close]
    assert channel.receive(wait=False) == []


async def test_a_waiting_engine_sleeps_until_a_message_comes() -> None:
    channel = RequestChannel(lambda _: None)
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.extend(channel.receive(wait=True)))
    thread.start()
    await anyio.sleep(0.02)
    assert not received
    close = Close()
    channel.put(close)
    await until(lambda: received)
    assert received == [close]
    thread.join()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_sending_to_a_loop_that_has_ended_is_harmless(backend: str) -> None:
    async def open_channel() -> RequestChannel:
        return RequestChannel(lambda _: None)

    channel = anyio.run(open_channel, backend=backend)
    channel.send(message(1))
    channel.send(message(2))
