"""What a collector gets of real requests: one tree each, whose phases add up, and nothing that nobody asked for."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.harness import Server
from tests.support.otlp_collector import Collector, Trace
from tests.support.tiny_model import tiny_server, write_tiny_model

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SECRET = "xylophone-of-the-archbishop"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms between two exports
ENDLESS = {"ignore_eos": True, "max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Told of its collector by the environment alone. Its cache holds little more than one long request."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_key_value_heads=2, head_dim=64)
    server = tiny_server(
        model=model, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=2048, kv_cache_memory="1MiB"
    )
    server.environment = SOON | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-the-collector",
        "OTEL_SERVICE_NAME": "wheel",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=mill,service.name=overruled",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "1",
    }
    with server:
        yield server.wait_ready()


@pytest.fixture
def ask(server: Server, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Sends a request to its end and returns its id."""

    def ask(body: dict[str, Any], path: str = COMPLETIONS, /, **headers: str) -> str:
        request_id = f"{request.node.name[:40]}-{random.randrange(2**40)}"
        answer = server.post(path, body, **{"x-request-id": request_id, **headers})
        assert "traceresponse" not in answer.headers  # of no standard yet
        return request_id

    return ask


def trace_of(server: Server, collector: Collector, request_id: str) -> Trace:
    trace = server.poll(lambda: collector.find(request_id), lambda found: found is not None)
    assert trace is not None
    return trace


def nanoseconds(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


def assert_adds_up(trace: Trace) -> None:
    """No gap, no overlap, and nothing outside of the request."""
    root, phases = trace.root, trace.phases
    assert phases, trace.attributes
    assert phases[0].name == "receive"
    for one, following in pairwise(phases):
        assert one.end_time_unix_nano == following.start_time_unix_nano, trace.names
        assert one.name != following.name, trace.names
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert abs(phases[-1].end_time_unix_nano - root.end_time_unix_nano) <= 0.01 * nanoseconds(root)
    for phase in phases:
        assert len(phase.events) <= 64
        for inner in trace.children.get(phase.span_id, []):
            assert inner.name == "blocked_on_client"
            assert phase.start_time_unix_nano <= inner.start_time_unix_nano
            assert inner.end_time_unix_nano <= phase.end_time_unix_nano


def a_prompt(num_tokens: int) -> list[int]:
    return [random.randrange(100, 40000) for _ in range(num_tokens)]


@pytest.mark.slow
def test_the_phases_of_whatever_is_asked_add_up(server: Server, collector: Collector, ask: Callable[..., str]) -> None:
    random.seed(7)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    requests: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": a_prompt(600), "max_tokens": 300, "ignore_eos": True, "stream": number % 2 == 0})
        for number in range(6)
    ]
    requests += [
        (COMPLETIONS, {"prompt": a_prompt(300), "max_tokens": 20, "ignore_eos": True, "n": 3}),
        (COMPLETIONS, {"prompt": [a_prompt(40), a_prompt(200)], "max_tokens": 9, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "response_format": schema}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "model": "tiny"}),
        (RESPONSES, {"input": "Hello", "max_output_tokens": 16, "stream": True}),
        ("/v1/embeddings", {"input": "Hello"}),
        (COMPLETIONS, {"prompt": a_prompt(600), "max_tokens": 1000, "ignore_eos": True, "timeout": 0.05}),
        (COMPLETIONS, {"prompt": "Hello", "max_tokens": -7}),
        (COMPLETIONS, {"prompt": "Hello", "model": "nobody"}),
    ]
    traces: dict[int, Trace] = {}

    def run(number: int) -> None:
        path, body = requests[number]
        traces[number] = trace_of(server, collector, ask(body, path))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traces) == len(requests)
    for trace in traces.values():
        assert_adds_up(trace)
    names = [name for trace in traces.values() for name in trace.names]
    assert {"parse", "tokenize", "check", "compile_grammar", "queue", "prefill", "decode", "deliver"} <= set(names)
    assert "preempted" in names
    chunks = [
        attribute.value.int_value
        for span in traces[0].phases
        for event in span.events
        for attribute in event.attributes
        if event.name == "prefill" and attribute.key == "headrace.tokens"
    ]
    assert sum(chunks) >= 600  # more if it was preempted
    assert len(chunks) > 1
    assert traces[6].attributes["gen_ai.request.choice.count"] == 3
    ended = [event for span in traces[6].phases for event in span.events if event.name == "finished"]
    assert len(ended) == 2  # the last one ends the request
    told = {name for name in traces[11].attributes if name.startswith("gen_ai.request.")}
    assert told == {"gen_ai.request.model"}, "an embedding is not sampled"


def test_names_and_resource_are_those_of_the_conventions(
    server: Server, collector: Collector, ask: Callable[..., str]
) -> None:
    request_id = ask({"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "seed": 5, "temperature": 0.5})
    trace = trace_of(server, collector, request_id)
    assert (trace.root.name, trace.root.parent_span_id) == ("POST /v1/completions", b"")
    first_token = trace.attributes.pop("gen_ai.server.time_to_first_token")
    assert 0 < first_token <= nanoseconds(trace.root) / 1e9
    assert trace.attributes == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "url.path": COMPLETIONS,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": f"cmpl-{request_id}",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 5,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "headrace.request_id": request_id,
    }
    assert collector.headers[-1]["authorization"] == "Bearer of-the-collector"
    resource = collector.resources[-1]
    assert (resource["service.name"], resource["deployment.environment"]) == ("wheel", "mill")


def test_the_callers_trace_goes_on_if_it_is_well_formed_and_sampled(
    server: Server, collector: Collector, ask: Callable[..., str]
) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    sampled = f"00-{TRACE_ID}-{PARENT_ID}-01"
    root = trace_of(server, collector, ask(body, traceparent=sampled, tracestate="a=1,b=2")).root
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE_ID, PARENT_ID, "a=1,b=2")
    unsampled = ask(body, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    ill_formed = ["nonsense", f"ff-{TRACE_ID}-{PARENT_ID}-01", f"00-{'0' * 32}-{PARENT_ID}-01", sampled + "-more"]
    for traceparent in [*ill_formed, sampled.upper()]:
        root = trace_of(server, collector, ask(body, traceparent=traceparent, tracestate="a=1")).root
        assert (root.parent_span_id, root.trace_state) == (b"", "")
        assert root.trace_id.hex() != TRACE_ID
    twice = [("traceparent", sampled), ("traceparent", sampled), ("x-request-id", "twice")]
    server.client.post(COMPLETIONS, json=body, headers=httpx.Headers(twice))
    assert trace_of(server, collector, "twice").root.parent_span_id == b""
    assert collector.find(unsampled) is None  # though all that came later has arrived


def test_log_lines_have_the_ids_of_trace_and_span(
    server: Server, collector: Collector, ask: Callable[..., str]
) -> None:
    request_id = ask({"prompt": "Hello", "max_tokens": 1})
    root = trace_of(server, collector, request_id).root
    lines = [json.loads(each) for each in server.log.splitlines() if request_id in each]
    [line] = [each for each in lines if each["event"] == "request"]
    assert (line["trace_id"], line["span_id"]) == (root.trace_id.hex(), root.span_id.hex())


def test_questions_about_the_server_have_no_trace(
    server: Server, collector: Collector, ask: Callable[..., str]
) -> None:
    for path in ("/v1/models", "/v1/models/nobody", "/version", "/api/tags", "/livez"):
        server.client.get(path)
    trace_of(server, collector, ask({"prompt": "Hello", "max_tokens": 1}))  # comes after whatever those have sent
    assert not [name for trace in collector.traces() if (name := trace.root.name).startswith("GET")]


def test_only_what_is_the_servers_fault_is_an_error(
    server: Server, collector: Collector, ask: Callable[..., str]
) -> None:
    def told(request_id: str) -> tuple[int, int | None, str | None]:
        trace = trace_of(server, collector, request_id)
        attributes = trace.attributes
        return trace.root.status.code, attributes.get("http.response.status_code"), attributes.get("error.type")

    unset, error = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
    assert told(ask({"prompt": "Hello", "top_p": 7})) == (unset, 400, "invalid_request_error")
    assert told(ask({"prompt": "Hello", "model": "nobody"})) == (unset, 404, "model_not_found")
    late = {"prompt": a_prompt(600), "ignore_eos": True, "max_tokens": 1400, "timeout": 0.05}
    assert told(ask(late)) == (error, 504, "deadline_exceeded")
    # A stream that has begun has said 200 already.
    assert told(ask({**late, "prompt": "Hello", "stream": True, "timeout": 0.2})) == (error, 200, "deadline_exceeded")
    with server.connect() as client:
        client.post(COMPLETIONS, {"prompt": "Hello", **ENDLESS}, {"x-request-id": "leaver"})
        client.read_head()
        client.leave_with_rst()
    assert told("leaver") == (unset, 200, "client_gone")
    trace = trace_of(server, collector, "leaver")
    assert_adds_up(trace)
    assert trace.names[-1] in ("prefill", "decode")
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_a_client_that_does_not_read_is_seen_beside_what_the_engine_does(server: Server, collector: Collector) -> None:
    body = {"prompt": "Hello", **ENDLESS, "logprobs": 20}
    before = server.metrics().generation_tokens
    with server.connect(receive_buffer=4096) as client:
        client.post(COMPLETIONS, body, {"x-request-id": "sleeper"})
        server.wait_until(lambda now: now.generation_tokens == before + ENDLESS["max_tokens"])
        client.read_body()
    trace = trace_of(server, collector, "sleeper")
    assert_adds_up(trace)
    blocked = [span for phase in trace.phases for span in trace.children.get(phase.span_id, [])]
    assert sum(map(nanoseconds, blocked)) > 0
    assert trace.attributes["headrace.blocked_on_client_seconds"] > 0


def test_a_response_in_the_background_belongs_to_the_request_that_began_it(
    server: Server, collector: Collector
) -> None:
    body = {"input": "Hello", "background": True, "max_output_tokens": 16}
    server.post(RESPONSES, body, **{"x-request-id": "beginner"})
    both = server.poll(
        lambda: [t for t in collector.traces() if t.attributes.get("headrace.request_id") == "beginner"],
        lambda found: len(found) == 2,
    )
    ids = {trace.root.span_id for trace in both}
    [begun] = [trace for trace in both if trace.root.parent_span_id in ids]
    assert_adds_up(begun)
    assert "decode" in begun.names
    assert begun.root.trace_id == both[0].root.trace_id == both[1].root.trace_id


def test_no_text_is_told_unless_it_is_asked_for(server: Server, collector: Collector, ask: Callable[..., str]) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "stop": [SECRET], "user": SECRET}
    trace_of(server, collector, ask(body, CHAT))
    assert SECRET.encode() not in collector.raw
    assert SECRET not in server.log


@pytest.mark.slow
def test_a_collector_that_refuses_or_hangs_costs_traces_and_nothing_else(collector: Collector) -> None:
    """Also: text where it is asked for, and a ratio that leaves traces to those who ask for one."""
    with Collector() as other:
        server = tiny_server(otlp_endpoint=other.url, trace_messages=True, max_num_seqs=4)
        server.environment = SOON | {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16"}
        server.environment |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
        body = {"messages": [{"role": "user", "content": SECRET + "a" * 9000}], "max_tokens": 2, "ignore_eos": True}
        traced = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        with server:
            server.wait_ready()

            def post(request_id: str, **more: object) -> None:
                assert server.post(CHAT, {**body, **more}, **traced, **{"x-request-id": request_id}).status_code == 200

            def lost(reason: str) -> float:
                return server.metrics().samples[f"headrace:lost_traces_total{{reason={reason}}}"]

            server.chat("Nobody asks for a trace of this.", max_tokens=1)
            post("told")
            trace = trace_of(server, other, "told")
            assert len(other.traces()) == 1
            assert trace.root.name == f"POST {CHAT}"
            [asked] = json.loads(trace.attributes["gen_ai.input.messages"])
            assert asked == {"role": "user", "parts": [{"type": "text", "content": (SECRET + "a" * 9000)[:4096]}]}
            [answered] = json.loads(trace.attributes["gen_ai.output.messages"])
            assert answered["role"] == "assistant"
            assert answered["parts"][0]["content"]
            post("private", prompt_cache_retention="in_memory")
            assert "gen_ai.input.messages" not in trace_of(server, other, "private").attributes

            other.status = 400
            post("refused")
            server.poll(lambda: lost("export_failed"), lambda count: count >= 1)
            assert lost("queue_full") == 0
            other.answers.clear()
            for _ in range(20):
                post("hangs")
            assert lost("queue_full") > 0
            assert server.stop() == 0
            assert not other.answers.is_set()
