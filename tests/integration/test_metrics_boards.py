"""The board, the rules and the alerts that are shipped show something: a real Prometheus asks whatever they ask of a
real server under load. So do vLLM's boards and the pickers of gateways.
"""

from __future__ import annotations

import json
import random
import re
import runpy
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import REPOSITORY, Metrics, Server
from tests.support.prometheus import SHIPPED, Prometheus, program
from tests.support.tiny_model import tiny_server, write_tiny_model

GRAFANA = REPOSITORY / "deploy" / "grafana"
BOARD = json.loads((GRAFANA / "headrace.json").read_text())
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TENANTS = """
[tenants.acme]
keys = ["acme-secret"]

[tenants.small]
keys = ["small-secret"]
max_queued_requests = 1
"""
CONTEXT = 1024
VOCABULARY = 8192
# Two prompts of this size fill the KV cache; a piece on disk is 128 tokens of this model.
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}
HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 300, "ignore_eos": True}
# What only a fault counts: no load does.
FAULTS = {"headrace:kv_tier_failed_loads_total", "headrace:lost_traces_total"}
OF_HYBRID_MODELS = {"headrace:state_checkpoint_hits_total"}
OF_SEVERAL_MODELS = {"headrace:model_unloads_total", "headrace:load_wait_seconds_count"}
OF_SEVERAL_ENGINES = {
    f"headrace:{name}_total" for name in ("routed_prompts", "requests_placed_again", "engine_deaths", "kv_event_gaps")
}


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("boards")
    (folder / "tenants.toml").write_text(TENANTS)
    settings: dict[str, Any] = {
        "model": write_tiny_model(folder / "tiny", **MODEL),
        "api_keys_file": folder / "tenants.toml",
        "kv_cache_dir": folder / "kv",
        "kv_cache_memory": "8MiB",
        "max_model_len": CONTEXT,
        "max_num_seqs": 4,
        "max_queue_time": 2,
        "admin_keys": "operator",
    }
    with tiny_server(**settings) as running:
        running.client.headers["authorization"] = "Bearer acme-secret"
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server) -> Iterator[Prometheus]:
    """It has seen the load from before to after."""
    with Prometheus(server.port, "operator") as running:
        server.wait_ready()
        running.wait_for_looks()
        put_under_load(server)
        running.wait_for_looks()
        yield running


def put_under_load(server: Server) -> None:
    """Something of everything."""
    prompts = [prompt(seed, 300) for seed in range(6)]
    with ThreadPoolExecutor(4) as threads:  # more than the KV cache holds: some are put back
        list(threads.map(lambda each: server.complete(each, **LONG), prompts[:4]))
    for each in prompts * 2:  # some are in the KV cache, some on disk only
        server.complete(each, max_tokens=1)
    for number in range(2):
        server.complete(prompt(10 + number, 20) + prompt(20, 800), max_tokens=1)

    answers = [
        server.post(CHAT, {"messages": HELLO, "max_tokens": 8, "stream": True}, authorization="Bearer small-secret"),
        server.post(CHAT, {"messages": HELLO, "max_tokens": 8, "temperature": -1}),
        server.post(CHAT, {"messages": HELLO, "max_tokens": 8, "model": "unknown"}),
        server.post(COMPLETIONS, {"prompt": prompts[0], **LONG, "timeout": 0.2}),
        server.post(MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": HELLO, "tools": [WEB_SEARCH]}),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 404, 504, 200]

    body = {"prompt": prompt(30, 900), "max_tokens": 1}
    while refused(server, "tenant_max_queued_requests") == 0:
        with ExitStack() as stack:
            clients = [stack.enter_context(server.connect()) for _ in range(4)]
            for client in clients:
                client.post(COMPLETIONS, body, {"authorization": "Bearer small-secret"})
            for client in clients:
                client.read_head()
    with ExitStack() as stack:  # they leave as soon as one of them was refused
        while refused(server, "max_queue_time") == 0:
            client = stack.enter_context(server.connect())
            client.post(COMPLETIONS, {"prompt": "Hi", **LONG}, {"authorization": "Bearer acme-secret"})
    server.wait_idle()


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def refused(server: Server, reason: str) -> float:
    return server.metrics().samples[f"vllm:admission_rejections_total{{reason={reason}}}"]


def page(server: Server) -> str:
    """What the operator's Prometheus reads."""
    answer = server.client.get("/metrics", headers={"authorization": "Bearer operator"})
    assert answer.status_code == 200
    return answer.text


def filled_in(expression: str) -> str:
    """A panel's query as Grafana asks it while all is chosen."""
    for name, value in {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m", "$model_name": ".*"}.items():
        expression = re.sub(re.escape(name) + r"\b", value, expression)
    assert "$" not in expression
    return expression


def are_numbers(prometheus: Prometheus, expression: str) -> bool:
    """Whether there is an answer, and a number in it."""
    return any(sample["value"][1] != "NaN" for sample in prometheus.query(expression))


# --- ours


def test_every_query_of_the_board_shows_something(prometheus: Prometheus) -> None:
    queries = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 80
    assert [query for query in queries if not are_numbers(prometheus, filled_in(query))] == []


def test_the_boards_variables_have_values(prometheus: Prometheus, server: Server) -> None:
    asked = {each["name"]: each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"}
    found = {}
    for name, query in asked.items():
        called = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert called is not None
        found[name] = prometheus.label_values(called[2], filled_in(called[1]))
    assert found == {"model": ["tiny"], "instance": [f"127.0.0.1:{server.port}"]}


def test_every_rule_has_data(prometheus: Prometheus) -> None:
    """Of an alert, what it compares with its limit: between two `and` or `or` at a time."""
    rules = prometheus.rules()
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    empty = []
    for rule in rules:
        parts = [rule["name"]]
        if rule["type"] == "alerting":
            parts = re.split(r"\s+(?:and|or)\s+", rule["query"])
            compared = [re.fullmatch(r"(.+?) (?:>=?|==) (?:[0-9.]+|\([0-9. *]+\))", part, re.DOTALL) for part in parts]
            parts = [part[1] for part in compared if part is not None]
            assert len(parts) == len(compared), rule["query"]
        empty += [part for part in parts if not are_numbers(prometheus, part)]
    assert empty == []


def test_the_load_has_moved_every_metric(prometheus: Prometheus, server: Server) -> None:
    samples = Metrics.parse(page(server)).samples
    moved: dict[str, float] = {}
    for sample, value in samples.items():
        name = sample.partition("{")[0]
        if name.endswith(("_total", "_count")) and name.startswith(("vllm:", "headrace:")):
            moved[name] = moved.get(name, 0.0) + value
    still = FAULTS | OF_HYBRID_MODELS | OF_SEVERAL_MODELS | OF_SEVERAL_ENGINES
    assert {name for name, value in moved.items() if value == 0.0} == still


# --- others'


def quantile(metric: str) -> str:
    return f'histogram_quantile(0.9, sum by(le) (rate({metric}_bucket{{model_name="$model_name"}}[$__rate_interval])))'


@pytest.mark.parametrize(
    "expression",
    [
        *(
            quantile(f"vllm:{name}")
            for name in (
                *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
                *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
                *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
                *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
            )
        ),
        'rate(vllm:e2e_request_latency_seconds_sum{model_name="$model_name"}[$__rate_interval]) '
        '/ rate(vllm:e2e_request_latency_seconds_count{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:prompt_tokens_total{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])',
        'vllm:num_requests_running{model_name="$model_name"}',
        'vllm:num_requests_waiting{model_name="$model_name"}',
        'vllm:kv_cache_usage_perc{model_name="$model_name"}',
        'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}[$__rate_interval]))',
        'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
        'rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:request_decode_time_seconds_sum{model_name="$model_name"}[$__rate_interval])',
        'max_over_time(vllm:num_preemptions_total{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:prefix_cache_hits_total{model_name="$model_name"}[$__rate_interval]) '
        '/ rate(vllm:prefix_cache_queries_total{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:external_prefix_cache_hits_total{model_name="$model_name"}[$__rate_interval]) '
        '/ rate(vllm:external_prefix_cache_queries_total{model_name="$model_name"}[$__rate_interval])',
        *(
            f'vllm:num_requests_waiting_by_reason{{model_name="$model_name",reason="{reason}"}}'
            for reason in ("capacity", "deferred")
        ),
    ],
)
def test_what_vllms_boards_ask_has_an_answer(prometheus: Prometheus, expression: str) -> None:
    query = expression.replace("$model_name", "tiny").replace("$__rate_interval", "1m")
    assert are_numbers(prometheus, query)


def test_a_gateways_endpoint_picker_finds_what_it_reads(prometheus: Prometheus) -> None:
    for gauge in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        [sample] = prometheus.query(f"vllm:{gauge}")
        assert float(sample["value"][1]) >= 0
    [sample] = prometheus.query("vllm:cache_config_info")
    assert (sample["metric"]["block_size"], sample["metric"]["num_gpu_blocks"]) == ("16", "64")
    [sample] = prometheus.query("vllm:lora_requests_info")
    assert sample["metric"]["max_lora"] == "0"
    assert float(sample["value"][1]) > 1e9, "the time of the news, in Unix seconds"


def test_clients_do_not_see_who_the_others_are(server: Server) -> None:
    assert 'headrace:tenant_tokens_total{kind="prompt",tenant="small"}' in page(server)
    clients = server.client.get("/metrics").text
    assert "vllm:prompt_tokens_total" in clients
    assert "headrace:tenant" not in clients
    assert "small" not in clients


# --- cardinality


def test_what_strangers_make_up_makes_no_series(prometheus: Prometheus, server: Server) -> None:
    def make_up(_: int) -> None:
        name = f"{uuid.uuid4()}"
        server.client.get(f"/{name}")
        server.client.get(f"/v1/models/{name}")
        server.client.get(f"/v1/responses/{name}?{name}=1")
        server.client.request("PROPFIND", f"/{name}")
        server.post(CHAT, {"model": name, "messages": HELLO})
        server.post(CHAT, {"messages": HELLO}, authorization=f"Bearer {name}")

    def make_up_more(_: int) -> None:
        name = f"{uuid.uuid4()}"
        body = {"messages": HELLO, "max_tokens": 1}
        server.post(
            CHAT, {**body, "user": name, "metadata": {name: name}}, **{"x-request-id": name, "user-agent": name}
        )
        server.post(MESSAGES, {**body, "model": "tiny", "tools": [{"type": name}]})

    def all_of_it(count: int) -> set[str]:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(make_up, range(10 * count)))
            list(threads.map(make_up_more, range(count)))
        return series(server)

    assert all_of_it(1) == all_of_it(10)


def series(server: Server) -> set[str]:
    return set(re.findall(r"^([^#].*) \S+$", page(server), re.MULTILINE))


# --- the files


def test_alerts_fire_when_they_should_and_not_when_they_should_not() -> None:
    subprocess.run([program("promtool"), "check", "config", SHIPPED / "prometheus.yml"], check=True)  # and the rules
    subprocess.run([program("promtool"), "test", "rules", Path(__file__).with_name("rules_test.yaml")], check=True)


def test_the_board_is_as_it_is_written() -> None:
    board = runpy.run_path(str(GRAFANA / "board.py"))["board"]()
    assert board == (GRAFANA / "headrace.json").read_text(), "python deploy/grafana/board.py"
    panels = json.loads(board)["panels"]
    assert all(panel["description"] and panel["targets"] for panel in panels if panel["type"] != "row")
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len({panel["id"] for panel in panels}) == len(panels)
