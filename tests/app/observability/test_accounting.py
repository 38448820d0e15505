"""The accounts balance: whatever becomes of a request, it ends once, and its tokens are the same wherever they count.

A storm of every kind of request goes over a small server. Afterwards what clients were told, the metrics, the log and
the timelines are laid side by side.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.chaos.harness import ChaosServer
from tests.support.harness import Metrics
from tests.support.raw_client import sse_events

COMPLETIONS = "/v1/completions"
KINDS = ("length", "crowd", "stop", "left", "expired", "doomed", "invalid", "too long")
STORM = 150
AT_ONCE = 12
SLOTS, PLACES = 4, 24
ENDLESS = 4000  # tokens: seconds, which no request of the storm is given


@dataclass
class Told:
    """What one client of the storm was told."""

    kind: str
    request_id: str
    status: int
    usage: dict[str, Any] | None = None  # None if nobody told it
    error: str | None = None


@dataclass
class Storm:
    told: list[Told]
    before: Metrics
    after: Metrics
    timelines: dict[str, dict[str, Any]]  # of the requests that were accepted
    log: dict[str, dict[str, Any]]  # the request lines, by request id

    def grown(self, name: str) -> int:
        """How much a metric has grown during the storm."""
        return int(self.after.samples[name] - self.before.samples[name])

    @property
    def accepted(self) -> list[Told]:
        return [told for told in self.told if told.status not in (400, 429)]


@pytest.fixture(scope="module")
def server() -> Iterator[ChaosServer]:
    with ChaosServer(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_queued_requests=PLACES) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def storm(server: ChaosServer) -> Storm:
    alone = server.complete(_prompt(3), max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    server.faults.order("nan", request="doomed")
    before = server.wait_idle()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tries = pool.map(lambda number: list(_try_again(server, number, stop=alone[20:24])), range(STORM))
        told = list(itertools.chain.from_iterable(tries))
    server.wait_idle()
    # A request is counted, and its line written, when its handler has ended, which may be after its client has left.
    all_ended = _http_requests(before) + len(told)
    after = server.wait_until(lambda now: _http_requests(now) >= all_ended)
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    found = {one.request_id: server.client.get(f"/v1/requests/{one.request_id}/timeline") for one in told}
    return Storm(
        told=told,
        before=before,
        after=after,
        timelines={request_id: answer.json() for request_id, answer in found.items() if answer.status_code == 200},
        log={line["request_id"]: line for line in lines if line.get("event") == "request"},
    )


def _http_requests(metrics: Metrics) -> int:
    return sum(metrics.http_requests(COMPLETIONS, status) for status in ("2xx", "4xx", "5xx"))


def _prompt(number: int) -> list[int]:
    """Prompts that share a beginning, so that the prefix cache has its part."""
    return [500 + index for index in range(40)] + [2000 + number % 7] * (number % 5)


def _try_again(server: ChaosServer, number: int, stop: str) -> Iterator[Told]:
    """Sends a request until it is not refused, as clients do; a crowd gives up at once."""
    for attempt in itertools.count():
        told = _send(server, number, attempt, stop)
        yield told
        if told.status != 429 or told.kind == "crowd":
            return
        time.sleep(0.1)


def _send(server: ChaosServer, number: int, attempt: int, stop: str) -> Told:
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    body: dict[str, Any] = {"prompt": _prompt(number), "temperature": 0, "ignore_eos": True, "n": 1 + number % 3 // 2}
    variant: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": chance.randrange(1, 60)},
        "crowd": {"max_tokens": 3, "n": PLACES},  # finds room in an empty queue only
        "stop": {"prompt": _prompt(3), "max_tokens": 200, "stop": stop},
        "left": {"max_tokens": ENDLESS},
        "expired": {"max_tokens": ENDLESS, "timeout": chance.uniform(0.2, 0.6)},
        "doomed": {"max_tokens": 20},
        "invalid": {"temperature": -1},
        "too long": {"prompt": [1] * 8192},
    }
    body |= variant[kind]
    request_id = f"{kind.replace(' ', '-')}-{number}-{attempt}"
    if kind == "left":
        return _send_and_leave(server, body, request_id, chance.randrange(4))
    headers = {"x-request-id": request_id}
    if number // len(KINDS) % 2:
        answer = server.client.post(COMPLETIONS, json=body, headers=headers)
        content = answer.json()
        error = content["error"]["code"] or "invalid" if "error" in content else None
        return Told(kind, request_id, answer.status_code, content.get("usage"), error)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            return Told(kind, request_id, answer.status_code, error=json.loads(answer.read())["error"]["code"])
        *_, last, done = sse_events(answer.iter_bytes())
    assert done == "[DONE]"
    return Told(kind, request_id, 200, last["usage"], last["error"]["code"] if "error" in last else None)


def _send_and_leave(server: ChaosServer, body: dict[str, Any], request_id: str, num_events: int) -> Told:
    with server.connect() as client:
        client.post(COMPLETIONS, body | {"stream": True}, {"x-request-id": request_id})
        status = client.read_head().status_code
        if status != 200:
            return Told("left", request_id, status, error=json.loads(client.read_body())["error"]["code"])
        events = sse_events(client.chunks())
        for _ in range(num_events):
            next(events)
        client.leave_with_rst()
    return Told("left", request_id, status)


@pytest.mark.slow
def test_the_storm_had_every_kind_of_request_and_of_end(storm: Storm) -> None:
    assert {told.kind for told in storm.accepted} >= {"length", "stop", "left", "expired", "doomed"}
    reasons = {story["finish_reason"] for story in storm.timelines.values()}
    assert reasons == {"length", "stop", "abort", "timeout", "error"}
    assert {told.status for told in storm.told} >= {200, 400, 429, 500, 504}
    cached = [story["cached_tokens"] for story in storm.timelines.values()]
    assert any(cached)
    assert not all(cached)


@pytest.mark.slow
def test_every_accepted_request_ends_in_exactly_one_reason(storm: Storm) -> None:
    assert storm.timelines.keys() == {told.request_id for told in storm.accepted}
    counted = {reason: count - storm.before.finished[reason] for reason, count in storm.after.finished.items()}
    assert sum(counted.values()) == len(storm.accepted)
    by_reason = Counter(story["finish_reason"] for story in storm.timelines.values())
    assert by_reason == {reason: count for reason, count in counted.items() if count}
    expected = {
        "length": "length",
        "crowd": "length",
        "stop": "stop",
        "left": "abort",
        "expired": "timeout",
        "doomed": "error",
    }
    for told in storm.accepted:
        assert storm.timelines[told.request_id]["finish_reason"] == expected[told.kind]


def test_every_refused_request_is_counted_as_refused_and_nowhere_else(storm: Storm) -> None:
    refused = [told for told in storm.told if told.status == 429]
    reasons = [name for name in storm.after.samples if name.startswith("vllm:admission_rejections_total")]
    assert sum(map(storm.grown, reasons)) == len(refused)
    assert all(told.error == "queue_full" for told in refused)
    for told in storm.told:
        if told.status in (400, 429):
            assert told.request_id not in storm.timelines
            assert "output_tokens" not in storm.log[told.request_id]


def test_every_request_is_in_the_log_and_in_the_http_metrics_once(storm: Storm) -> None:
    assert storm.log.keys() >= {told.request_id for told in storm.told}
    for family in ("2xx", "4xx", "5xx"):
        answered = [told for told in storm.told if f"{told.status // 100}xx" == family]
        counted = storm.after.http_requests(COMPLETIONS, family) - storm.before.http_requests(COMPLETIONS, family)
        assert counted == len(answered)
    for told in storm.told:
        assert storm.log[told.request_id]["status"] == told.status


def test_token_counters_are_the_sum_of_usage_whatever_became_of_a_request(storm: Storm) -> None:
    prompt_tokens = sum(story["prompt_tokens"] for story in storm.timelines.values())
    output_tokens = sum(story["output_tokens"] for story in storm.timelines.values())
    assert storm.grown("vllm:prompt_tokens_total") == prompt_tokens
    assert storm.grown("vllm:request_prompt_tokens_sum") == prompt_tokens
    assert storm.grown("vllm:generation_tokens_total") == output_tokens
    assert storm.grown("vllm:request_generation_tokens_sum") == output_tokens
    for counted in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
        assert storm.grown(f"vllm:{counted}_count") == len(storm.accepted)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens", "finish_reason"):
        for request_id, story in storm.timelines.items():
            assert storm.log[request_id][name] == story[name]


def test_what_clients_were_told_is_what_was_counted(storm: Storm) -> None:
    told_by_kind: Counter[str] = Counter()
    for told in storm.accepted:
        if told.usage is None:
            continue
        told_by_kind[told.kind] += 1
        story = storm.timelines[told.request_id]
        assert told.usage["prompt_tokens"] == story["prompt_tokens"]
        assert told.usage["completion_tokens"] == story["output_tokens"]
        assert told.usage["total_tokens"] == story["prompt_tokens"] + story["output_tokens"]
    assert told_by_kind["length"] == sum(told.kind == "length" for told in storm.accepted)
    assert told_by_kind.keys() >= {"length", "stop", "expired"}, "a stream that expired says what it has used"


def test_the_segments_of_a_timeline_are_its_whole_time(storm: Storm) -> None:
    order = ("receive", "tokenize", "queue", "prefill", "decode", "deliver")
    for request_id, story in storm.timelines.items():
        names = [segment["name"] for segment in story["segments"]]
        assert names == sorted(names, key=order.index)
        assert names[:3] == ["receive", "tokenize", "queue"]
        assert ("decode" in names) == (story["output_tokens"] > 0)
        assert all(segment["seconds"] >= 0 for segment in story["segments"])
        total = sum(segment["seconds"] for segment in story["segments"])
        assert total == pytest.approx(story["seconds"], rel=0.01)
        assert storm.log[request_id]["seconds"] == pytest.approx(story["seconds"], abs=0.001)
        assert story["blocked_on_client_seconds"] <= story["seconds"]


def test_the_events_of_a_timeline_agree_with_its_tokens(storm: Storm) -> None:
    whole = 0
    for story in storm.timelines.values():
        by_choice: dict[int, list[dict[str, Any]]] = {}
        for event in story["events"]:
            assert 0 <= event["at"] <= story["seconds"]
            by_choice.setdefault(event["choice"], []).append(event)
        assert (story["finish_reason"] in ("length", "stop")) <= bool(by_choice)
        for events in by_choice.values():
            assert [event["at"] for event in events] == sorted(event["at"] for event in events)
            if events[-1]["event"] == "finished":  # while another choice was not
                assert 0 <= events.pop()["tokens"] <= story["output_tokens"]
            if not events:
                continue
            first, *chunks = events
            assert first["event"] == "scheduled"
            assert all(event["event"] == "prefill" and event["tokens"] > 0 for event in chunks)
            computed = first["tokens"] + sum(event["tokens"] for event in chunks)
            assert computed <= story["prompt_tokens"]
            if story["finish_reason"] in ("length", "stop"):
                whole += 1
                assert computed == story["prompt_tokens"], "cached and computed tokens are the prompt"
        if by_choice.get(0) and story["output_tokens"]:
            assert by_choice[0][0]["tokens"] == story["cached_tokens"]
    assert whole


def test_prompts_were_computed_or_reused_and_nothing_else(storm: Storm) -> None:
    events = [event for story in storm.timelines.values() for event in story["events"]]
    computed = sum(event["tokens"] for event in events if event["event"] == "prefill")
    reused = sum(event["tokens"] for event in events if event["event"] == "scheduled")
    assert storm.grown("vllm:prompt_tokens_by_source_total{source=local_compute}") >= computed
    assert storm.grown("vllm:prompt_tokens_by_source_total{source=local_cache_hit}") >= reused
    assert storm.grown("vllm:prefix_cache_hits_total") >= reused


@pytest.mark.slow
def test_only_the_last_timelines_are_kept() -> None:
    size = 3
    with ChaosServer(device="simulated", timeline_size=size) as server:
        server.wait_ready()
        ids = []
        for _ in range(5):
            answer = server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True})
            assert answer.status_code == 200
            ids.append(answer.headers["x-request-id"])
        statuses = [server.client.get(f"/v1/requests/{request_id}/timeline").status_code for request_id in ids]
        assert statuses == [404] * (5 - size) + [200] * size


def test_a_timeline_is_there_when_its_request_has_ended_and_not_before(server: ChaosServer) -> None:
    server.wait_idle()
    path = "/v1/requests/still-running/timeline"
    stream = server.stream("still-running", max_tokens=ENDLESS)
    stream.read_some()
    assert server.client.get(path).status_code == 404
    stream.close()
    story = server.poll(lambda: server.client.get(path), lambda answer: answer.status_code == 200).json()
    assert story["finish_reason"] == "abort"
    assert story["status"] == 200
    assert 0 < story["output_tokens"] < ENDLESS
