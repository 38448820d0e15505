"""Responses in the background: they need nobody, can be looked at, read again, cancelled and forgotten at any time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.harness import TIMEOUT, Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import NAME, tiny_server

EVENT = TypeAdapter(ResponseStreamEvent)
SHORT: dict[str, Any] = {"model": NAME, "input": "Hi.", "temperature": 0, "max_output_tokens": 24}
ENDLESS: dict[str, Any] = {**SHORT, "max_output_tokens": 8000}
EXTRA = {"ignore_eos": True}
PATH = "/v1/responses"
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[Server]:
    with tiny_server(
        api_keys="one,two", admin_keys="admin", max_background_responses=4, max_num_seqs=4, kv_cache_memory="48MiB"
    ) as running:
        running.client.headers["authorization"] = "Bearer one"
        yield running.wait_ready()


@pytest.fixture
def sdk(keyed_server: Server) -> Iterator[openai.OpenAI]:
    url = f"{keyed_server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="one", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def wait_ended(server: Server, sdk: openai.OpenAI, response_id: str) -> Response:
    """As clients wait: by asking again and again. What has been seen only grows."""
    seen = ""

    def look() -> Response:
        nonlocal seen
        response = sdk.responses.retrieve(response_id)
        assert response.output_text.startswith(seen)
        seen = response.output_text
        if response.status not in ENDED:
            assert response.status in ("queued", "in_progress")
            assert response.usage is None
        return response

    return server.poll(look, lambda response: response.status in ENDED, interval=0.01)


def start(server: Server, body: dict[str, Any] = ENDLESS, **headers: str) -> str:
    answer = server.post(PATH, {**body, **EXTRA, "background": True}, **headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] in ("queued", "in_progress")
    return answer.json()["id"]


def events_of(server: Server, response_id: str, starting_after: int | None = None) -> list[dict[str, Any]]:
    query = "" if starting_after is None else f"&starting_after={starting_after}"
    answer = server.client.get(f"{PATH}/{response_id}?stream=true{query}")
    assert answer.status_code == 200, answer.text
    return list(sse_events([answer.content]))


@pytest.mark.slow
def test_a_response_is_made_while_nobody_waits(sdk: openai.OpenAI, keyed_server: Server) -> None:
    before = keyed_server.wait_idle()
    whole = sdk.responses.create(**SHORT, extra_body=EXTRA)
    queued = sdk.responses.create(**SHORT, extra_body=EXTRA, background=True)
    assert queued.status in ("queued", "in_progress")
    assert queued.background is True
    ended = wait_ended(keyed_server, sdk, queued.id)
    assert ended.status == whole.status == "incomplete"
    assert ended.output_text == whole.output_text
    assert ended.usage is not None
    assert whole.usage is not None
    assert ended.usage.output_tokens == whole.usage.output_tokens
    assert sdk.responses.retrieve(queued.id) == ended

    after = keyed_server.wait_idle()
    assert after.finished["length"] == before.finished["length"] + 2
    assert after.http_requests(PATH, "2xx") == before.http_requests(PATH, "2xx") + 2
    [line] = keyed_server.poll(  # written when all else of the request is over
        lambda: [line for line in keyed_server.log.splitlines() if queued.id[5:] in line and '"length"' in line], bool
    )
    timeline = keyed_server.client.get(f"/v1/requests/{queued.id.removeprefix('resp_')}/timeline").json()
    assert timeline["output_tokens"] == 24
    assert orjson.loads(line)["status"] == 200


def test_its_events_are_read_again_from_anywhere(sdk: openai.OpenAI, keyed_server: Server) -> None:
    response = wait_ended(keyed_server, sdk, start(keyed_server, SHORT))
    events = events_of(keyed_server, response.id)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert names[-1] == "incomplete"
    for event in events:
        EVENT.validate_json(orjson.dumps(event), strict=True)
    assert Response.model_validate(events[-1]["response"]) == response
    assert "".join(event["delta"] for event in events if "delta" in event) == response.output_text
    for number in (0, 1, 7, len(events) - 2, len(events) - 1, len(events) + 9):
        assert events_of(keyed_server, response.id, number) == events[number + 1 :]
    by_sdk = sdk.responses.retrieve(response.id, stream=True, starting_after=5)
    assert [event.sequence_number for event in by_sdk] == list(range(6, len(events)))
    with sdk.responses.stream(response_id=response.id, starting_after=5) as stream:
        assert [event.sequence_number for event in stream] == list(range(6, len(events)))


async def test_the_asynchronous_client_does_all_of_it(keyed_server: Server) -> None:
    url = f"{keyed_server.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="one", max_retries=0, timeout=TIMEOUT) as sdk:
        stream = await sdk.responses.create(**ENDLESS, extra_body=EXTRA, background=True, stream=True)
        created = await anext(stream)
        assert created.type == "response.created"
        assert created.response.status == "queued"
        await stream.close()
        again = await sdk.responses.retrieve(created.response.id, stream=True, starting_after=0)
        async for event in again:
            if event.sequence_number == 20:
                assert (await sdk.responses.cancel(created.response.id)).status == "cancelled"
        assert event.type == "response.incomplete"
        assert event.response.status == "cancelled"


def test_a_client_that_leaves_ends_its_reading_and_nothing_else(keyed_server: Server) -> None:
    before = keyed_server.wait_idle()
    body = {**ENDLESS, **EXTRA, "max_output_tokens": 400, "background": True, "stream": True}
    with keyed_server.connect() as client:
        client.post(PATH, body, {"authorization": "Bearer one"})
        assert client.read_head().status_code == 200
        created = next(sse_events(client.chunks()))
        client.leave_with_rst()
    events = events_of(keyed_server, created["response"]["id"])
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 400
    after = keyed_server.wait_idle()
    assert after.aborted == before.aborted


def test_cancelling_is_idempotent(sdk: openai.OpenAI, keyed_server: Server) -> None:
    before = keyed_server.wait_idle()
    running = start(keyed_server)
    keyed_server.wait_until(lambda now: now.generation_tokens > before.generation_tokens)
    cancelled = sdk.responses.cancel(running)
    assert cancelled.status == "cancelled"
    assert sdk.responses.cancel(running) == sdk.responses.retrieve(running) == cancelled
    keyed_server.wait_until(lambda now: now.aborted > before.aborted)
    assert keyed_server.wait_idle().aborted == before.aborted + 1
    ended = wait_ended(keyed_server, sdk, start(keyed_server, SHORT))
    assert sdk.responses.cancel(ended.id) == ended


def test_one_that_is_deleted_while_it_runs_is_gone(sdk: openai.OpenAI, keyed_server: Server) -> None:
    before = keyed_server.wait_idle()
    running = start(keyed_server)
    with keyed_server.client.stream("GET", f"{PATH}/{running}?stream=true") as reader:
        events = sse_events(reader.iter_bytes())
        assert next(events)["type"] == "response.created"
        sdk.responses.delete(running)
        *_, last = events
    assert last["type"] == "error"
    assert "deleted" in last["message"]
    EVENT.validate_json(orjson.dumps(last), strict=True)
    for ask in (sdk.responses.retrieve, sdk.responses.cancel, sdk.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(running)
    keyed_server.wait_until(lambda now: now.aborted > before.aborted)
    assert keyed_server.wait_idle().aborted == before.aborted + 1


def test_it_is_its_tenants_alone_and_of_each_there_are_so_many(keyed_server: Server) -> None:
    running = [start(keyed_server) for _ in range(4)]
    full = keyed_server.post(PATH, {**ENDLESS, "background": True})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert full.headers["retry-after"]
    assert "4 of 4" in full.json()["error"]["message"]
    assert keyed_server.metrics().samples["vllm:admission_rejections_total{reason=max_background_responses}"] >= 1

    other = {"authorization": "Bearer two"}
    theirs = start(keyed_server, authorization="Bearer two")
    for method, path in [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
        ("DELETE", ""),
    ]:
        answer = keyed_server.client.request(method, f"{PATH}/{running[0]}{path}", headers=other)
        assert answer.status_code == 404
    items = keyed_server.client.get(f"{PATH}/{running[0]}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hi."]
    assert keyed_server.client.delete(f"{PATH}/{theirs}", headers=other).status_code == 200
    for response_id in running:
        assert keyed_server.client.delete(f"{PATH}/{response_id}").status_code == 200
    keyed_server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"temperature": 3}, 400, "temperature", "[0.0, 2.0]"),
        ({"store": False}, 400, "background", "needs store"),
        ({"input": "word " * 9000}, 400, "input", "maximum context length"),
        ({"model": "gpt-5"}, 404, "model", "does not exist"),
        ({"background": "yes"}, 400, "background", "true or false"),
    ],
)
def test_what_is_wrong_at_once_is_a_plain_answer(
    keyed_server: Server, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    for stream in (True, False):
        body = {**SHORT, "background": True, "stream": stream, **fields}
        answer = keyed_server.client.post(PATH, json=body, headers={"x-request-id": "wrong"})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
        assert words in answer.json()["error"]["message"]
        assert keyed_server.client.get(f"{PATH}/resp_wrong").status_code == 404


def test_its_deadline_and_the_operator_end_it(sdk: openai.OpenAI, keyed_server: Server) -> None:
    late = wait_ended(keyed_server, sdk, start(keyed_server, {**ENDLESS, "timeout": 0.5}))
    assert late.status == "failed"
    assert late.error is not None
    assert late.error.code == "server_error"
    assert events_of(keyed_server, late.id)[-1]["type"] == "response.failed"
    running = start(keyed_server)
    answer = keyed_server.post("/abort_requests", {"request_ids": [running]}, authorization="Bearer admin")
    assert answer.json() == {"aborted": 1}
    assert wait_ended(keyed_server, sdk, running).status == "incomplete"
    keyed_server.wait_idle()


def test_the_operator_ends_the_response_and_not_those_who_follow_it(keyed_server: Server) -> None:
    body = {**ENDLESS, **EXTRA, "background": True, "stream": True}
    with keyed_server.client.stream("POST", PATH, json=body, headers={"x-request-id": "followed"}) as reader:
        events = sse_events(reader.iter_bytes())
        next(events)
        answer = keyed_server.post("/abort_requests", {"request_ids": ["followed"]}, authorization="Bearer admin")
        assert answer.json() == {"aborted": 1}
        *_, last = events
    assert last["type"] == "response.incomplete"
    keyed_server.wait_idle()


def test_what_cannot_be_read_again_or_continued_is_said(keyed_server: Server) -> None:
    plain = keyed_server.post(PATH, SHORT).json()["id"]
    running = start(keyed_server)
    for answer, param in [
        (keyed_server.client.get(f"{PATH}/{plain}?stream=true"), "stream"),
        (keyed_server.client.get(f"{PATH}/{running}?stream=true&starting_after=x"), "starting_after"),
        (keyed_server.client.get(f"{PATH}/{running}?stream=true&starting_after=-2"), "starting_after"),
        (keyed_server.post(PATH, {**SHORT, "previous_response_id": running}), "previous_response_id"),
    ]:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    same_id = {"x-request-id": running.removeprefix("resp_")}
    named = keyed_server.client.post(PATH, json={**SHORT, "background": True}, headers=same_id)
    assert (named.status_code, named.json()["error"]["code"]) == (409, "response_running")
    keyed_server.client.delete(f"{PATH}/{running}")
    keyed_server.wait_idle()


@pytest.mark.slow
def test_any_mixture_of_readers_cancels_and_deletes_leaves_nothing(keyed_server: Server) -> None:
    """And readers who join at any moment, and read at any pace, see the same events."""
    keyed_server.wait_idle()

    def one(seed: int) -> None:
        chance = random.Random(seed)
        headers = {"authorization": f"Bearer {('one', 'two')[seed % 2]}"}
        with httpx.Client(base_url=keyed_server.base_url, timeout=TIMEOUT, headers=headers) as client:
            body = {**SHORT, **EXTRA, "max_output_tokens": chance.randrange(1, 300), "background": True}
            answer = client.post(PATH, json=body)
            if answer.status_code == 429:
                return
            path = f"{PATH}/{answer.json()['id']}"
            fate = chance.choice(["end", "end", "cancel", "delete"])
            reads: list[list[Any]] = []

            def read() -> None:
                time.sleep(chance.random() / 10)
                start = chance.choice([-1, -1, 3, 50])
                with client.stream("GET", f"{path}?stream=true&starting_after={start}") as reader:
                    if reader.status_code == 404:
                        return
                    if chance.random() < 0.2:
                        return  # leaves
                    events = []
                    for event in sse_events(reader.iter_bytes(chance.choice([100, 10_000]))):
                        events.append(event)
                        if chance.random() < 0.02:
                            time.sleep(0.01)
                    if events and events[-1]["type"] != "error":
                        assert events[0]["sequence_number"] == start + 1
                        reads.append(events)

            def decide() -> None:
                time.sleep(chance.random() / 5)
                if fate == "cancel":
                    assert client.post(f"{path}/cancel").json()["status"] in ENDED
                elif fate == "delete":
                    assert client.delete(path).status_code == 200

            with ThreadPoolExecutor(4) as threads:
                for done in [threads.submit(decide), *(threads.submit(read) for _ in range(3))]:
                    done.result()
            if fate != "delete":
                whole = list(sse_events([client.get(f"{path}?stream=true").content]))
                assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
                assert whole[-1]["response"] == client.get(path).json()
                assert all(events == whole[events[0]["sequence_number"] :] for events in reads)
                assert client.delete(path).status_code == 200
            assert client.get(path).status_code == 404

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(one, seed) for seed in range(24)]:
            done.result()
    keyed_server.wait_idle()
    load = keyed_server.client.get("/load").json()["server_load"]
    assert load <= 1, "nobody is being answered but the one who asks"
    assert "Traceback" not in keyed_server.log
