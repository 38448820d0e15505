"""`headrace bench serve` as a user types it: against a real server, its totals are the server's own."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.commands.cli import main
from tests.app.bench.scripted_server import SSE_HEAD, chunk, event, scripted, usage
from tests.app.simulate.helpers import TABLE, spread_table
from tests.selection import slow_except
from tests.support.harness import Server
from tests.support.tiny_model import NAME, tiny_server

pytestmark = pytest.mark.seconds

# Of the result of vLLM's `bench serve --save-result --save-detailed` for a model that generates.
VLLM_KEYS = """
    date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
    duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
    output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
    mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms
    input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors"""

VLLM_FLAGS = """
    --backend --base-url --host --port --endpoint --header --max-concurrency --model --input-len --output-len
    --tokenizer --logprobs --request-rate --burstiness --num-warmups --save-result --save-detailed --append-result
    --metadata --result-dir --result-filename --ignore-eos --percentile-metrics --metric-percentiles --goodput
    --request-id-prefix --top-p --top-k --min-p --temperature --frequency-penalty --presence-penalty
    --repetition-penalty --served-model-name --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --extra-body
    --insecure --label --disable-tqdm --seed --num-prompts --dataset-name --dataset-path --random-input-len
    --random-output-len --random-range-ratio --random-prefix-len --sharegpt-output-len --ready-check-timeout-sec"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=8, max_queued_requests=6) as running:
        yield running.wait_ready()


def bench(server: Server, directory: Path, *flags: str) -> dict[str, Any]:
    """The result that is saved by a run that has answers."""
    kept = ("--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "result.json")
    assert main(["bench", "serve", "--base-url", server.base_url, *flags, *kept]) == 0
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


async def answer_of_one_token(_body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield SSE_HEAD + chunk(event(" a")) + chunk(usage(3, 1)) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


def test_estimates_are_called_so_and_details_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer_without_usage(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD + chunk(event(" a")) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"

    with scripted(answer_without_usage) as quiet:
        flags = ("--base-url", quiet.url, "--model", "m", "--num-prompts", "2", "--result-dir", str(tmp_path))
        assert main(["bench", "serve", *flags, "--save-detailed", "--result-filename", "r.json"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["requests_without_usage"] == len(result["ttfts"]) == 2
    assert "The server sent no usage for 2 requests" in capsys.readouterr().out


def test_gaps_are_those_of_each_choice(tmp_path: Path) -> None:
    async def answer_of_two_choices(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD
        for _ in range(4):
            for index in (0, 1):  # in one read, as a server sends what one step has made
                yield chunk("data: " + json.dumps({"choices": [{"index": index, "text": "a"}]}) + "\n\n")
            await asyncio.sleep(0.05)
        yield chunk(usage(3, 8)) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"

    with scripted(answer_of_two_choices) as quiet:
        flags = ("--base-url", quiet.url, "--model", "m", "--num-prompts", "1", "--result-dir", str(tmp_path))
        more = ("--save-detailed", "--result-filename", "r.json", "--extra-body", '{"n": 2}')
        assert main(["bench", "serve", *flags, *more]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["itls"][0]) == 6, "three gaps in each of two choices of four tokens"
    assert min(result["itls"][0]) > 0.03
    assert result["mean_tpot_ms"] > 30


def test_a_run_is_saved_whatever_its_errors_say_and_compared_with_what_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        body = json.dumps({"error": {"message": "no such tag [/INST] in [bold", "code": "[/red]"}})
        yield f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()

    with scripted(refused) as quiet:
        flags = ["--base-url", quiet.url, "--model", "m", "--num-prompts", "2", "--result-dir", str(tmp_path)]
        assert main(["bench", "serve", *flags, "--save-result", "--result-filename", "one.json"]) == 1
        assert "no such tag [/INST] in [bold" in " ".join(capsys.readouterr().out.split())
        good = json.loads((tmp_path / "one.json").read_text())
        wrong = ({"mean_ttft_ms": "x"}, {"failures": [1]}, {"completed": None}, {"ttfts": "abc"}, {"retry_after": 5})
        for number, each in enumerate(
            ["[" * 10**5, '{"failure_messages": {}}', *(json.dumps(good | w) for w in wrong)]
        ):
            (tmp_path / f"{number}.json").write_text(each)
            assert main(["bench", "serve", *flags, "--compare", str(tmp_path / f"{number}.json")]) == 1
            assert "allowed: a file that --save-result has written" in capsys.readouterr().err, each[:80]
    assert len(quiet.bodies) == 2, "nothing runs that could not be compared"


@pytest.mark.parametrize("number", slow_except([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_run_that_is_stopped_prints_what_it_has(number: signal.Signals, tmp_path: Path) -> None:
    async def third_hangs(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(slow.bodies) > 2:
            await asyncio.sleep(60)
        async for piece in answer_of_one_token(_body):
            yield piece

    with scripted(third_hangs) as slow:
        flags = ["--base-url", slow.url, "--model", "m", "--num-prompts", "5", "--max-concurrency", "1"]
        kept = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        command = [
            sys.executable,
            "-m",
            "app.commands.cli",
            "bench",
            "serve",
            *flags,
            *kept,
            "--header",
            "x-key=sk-secret",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while len(slow.bodies) < 3:
                time.sleep(0.05)
            process.send_signal(number)
            said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    assert "The run was stopped: 3 requests are left out" in said
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (2, 0)
    assert result["command"].endswith("--header x-key=...")
    assert "sk-secret" not in json.dumps(result)


def test_an_earlier_run_stands_beside_and_a_warm_cache_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer_from_the_cache(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD + chunk(event(" a")) + chunk(usage(10, 1, 5)) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n"

    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "serve", "--base-url", "http://me:pw@127.0.0.1:1"])
    with scripted(answer_from_the_cache, pages={"/version": {"version": "9.9"}}) as quiet:
        flags = ["--base-url", quiet.url, "--model", "m", "--num-prompts", "2", "--result-dir", str(tmp_path)]
        flags += ["--save-detailed", "--result-filename"]
        assert main(["bench", "serve", *flags, "one.json"]) == 0
        assert "50 % of the prompt tokens came from the prefix cache" in " ".join(capsys.readouterr().out.split())
        page = tmp_path / "page.html"
        beside = ["--compare", str(tmp_path / "one.json"), "--html", str(page)]
        assert main(["bench", "serve", *flags, "two.json", *beside]) == 0
    assert re.search(r"before: \d{8}-\d{6}", said := capsys.readouterr().out)
    assert said.count("  before ") >= 4
    html = page.read_text()
    for words in ("version 9.9", "cores, load", "headrace bench serve --base-url http://...@127.0.0.1:1", "p99 "):
        assert words in html
    assert "me:pw" not in html
    assert len(re.findall(r'class="line before" points="\d', html)) == 1, "TTFT; one token has no gap"
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--compare", str(page)]) == 1
    assert "allowed: a file that --save-result has written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", slow_except(["openai", "openai-chat"], "openai-chat"))
def test_totals_are_the_servers_own(server: Server, tmp_path: Path, backend: str) -> None:
    before = server.metrics()
    flags = ("--num-prompts", "20", "--max-concurrency", "4", "--input-len", "30", "--output-len", "60")
    result = bench(server, tmp_path, *flags, "--backend", backend, "--random-range-ratio", "0.3")
    after = server.wait_idle()
    assert result.keys() >= set(VLLM_KEYS.split())
    assert (result["completed"], result["failed"], result["model_id"]) == (20, 0, NAME)
    assert result["total_output_tokens"] == after.generation_tokens - before.generation_tokens
    assert result["total_input_tokens"] == after.prompt_tokens - before.prompt_tokens
    assert sum(result["output_lens"]) == result["total_output_tokens"]
    assert result["max_concurrent_requests"] == 4
    assert len(result["ttfts"]) == len(result["itls"]) == 20
    # This server keeps timelines, so client and server are compared.
    assert result["timelines_compared"] == 20
    assert result["timelines_with_other_token_counts"] == 0
    assert result["median_ttft_overhead_ms"] > -1
    assert result["median_server_prefill_ms"] > 0


@pytest.mark.slow
def test_an_open_loop_keeps_its_rate(server: Server, tmp_path: Path) -> None:
    result = bench(
        server, tmp_path, "--num-prompts", "20", "--request-rate", "20", "--input-len", "4", "--output-len", "2"
    )
    scheduled = result["scheduled_times"]
    assert scheduled == sorted(scheduled)
    assert 0.7 < scheduled[-1] - scheduled[0] < 1
    assert min(result["queue_times"]) >= 0
    assert result["request_rate"] == 20


def test_a_conversation_grows_and_its_beginning_is_cached(server: Server, tmp_path: Path) -> None:
    talk = ("--dataset-name", "conversation", "--conversation-turns", "3", "--conversation-think-time", "0.01")
    result = bench(
        server, tmp_path, *talk, "--num-prompts", "6", "--input-len", "64", "--output-len", "8", "--seed", "7"
    )
    first, second, third = result["input_lens"][:3]
    assert first + 64 < second < third
    assert result["total_cached_tokens"] > 0
    assert result["cached_lens"][2] > result["cached_lens"][1] > 0


def test_refusals_are_told_with_their_time_to_come_back(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    load = (
        "--num-prompts",
        "60",
        "--input-len",
        "200",
        "--output-len",
        "40",
        "--html",
        str(page),
        "--goodput",
        "e2el:1e9",
    )
    result = bench(server, tmp_path, *load)
    assert result["failures"] == {"HTTP 429 queue_full": result["refused"]}
    assert 0 < result["refused"] == 60 - result["completed"]
    assert min(result["retry_after"]) >= 1
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    said = capsys.readouterr().out
    assert re.search(rf"Refused +{result['refused']}, Retry-After \d", said)
    html = page.read_text()
    assert html.count("<svg") == 5
    assert html.count(f"{result['refused']:,} refused") == 5
    assert not re.findall(r"(?:src|href)=|url\(|@import", html)


def test_what_the_simulator_says_is_told_beside(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-prompts", "6", "--max-concurrency", "2", "--input-len", "16", "--output-len", "8")
    assert main(["bench", "serve", "--base-url", server.base_url, *flags, "--predict"]) == 1
    assert "does not report its step costs" in capsys.readouterr().err
    table = tmp_path / "table.json"
    table.write_bytes(TABLE.to_json())
    result = bench(server, tmp_path, *flags, "--predict", str(table))
    for key, error in result["prediction_error"].items():
        assert error == pytest.approx(result["predicted"][key] / result[key] - 1)
    # Beside other work all tokens of an answer may arrive together, in no time: then there is nothing to divide by.
    measured = {"p99_itl_ms"} if result["p99_itl_ms"] else set()
    assert result["prediction_error"].keys() >= {"output_throughput", "median_ttft_ms"} | measured
    printed = " ".join(capsys.readouterr().out.split())
    assert "Predicted by the step costs before the run, of unknown age: decodes of 1 to 64 tokens (9 steps)" in printed
    assert "tails are not predicted" in printed
    more = bench(server, tmp_path, *flags, "--extra-body", '{"n": 3}', "--predict", str(table))
    assert (result["n"], more["n"]) == (1, 3)
    assert more["total_output_tokens"] == 3 * result["total_output_tokens"]
    assert more["predicted"]["output_throughput"] > 1.5 * result["predicted"]["output_throughput"]


def test_a_prediction_has_the_step_costs_of_just_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEYS", "sk-admin")
    seen: list[int] = []  # requests that the server had answered when it was asked for its step costs

    class Pages(dict[str, object]):
        def get(self, path: str, default: object = None) -> object:
            if path != "/server_info":
                return super().get(path, default)
            seen.append(len(plain.bodies))
            table = spread_table()
            table.measured_at, table.machine_load = time.time(), 10.0 * len(plain.bodies)
            return {"step_cost": json.loads(table.to_json())}

    with scripted(answer_of_one_token, pages=Pages({"/v1/models": {"data": [{"id": "theirs"}]}})) as plain:
        flags = ["--num-prompts", "3", "--input-len", "4", "--output-len", "1", "--num-warmups", "2", "--predict"]
        assert main(["bench", "serve", "--base-url", plain.url, *flags]) == 0
    assert seen == [0, 2], "before the warm-ups, where a missing key is noticed, and after them"
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"before the run, measured 0:00:0\d ago at a load average of 20.0: decodes", printed)
    assert "the spread is drawn" in printed


def test_what_steps_cost_is_asked_of_the_server_with_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("HEADRACE_ADMIN_KEYS", "sk-admin,sk-other")
    info = {"step_cost": json.loads(TABLE.to_json()), "settings": {"max_num_seqs": 4}, "kv_cache": {"num_blocks": 64}}
    pages = {"/server_info": info, "/v1/models": {"data": [{"id": "theirs"}]}}
    with scripted(answer_of_one_token, pages=pages) as plain:
        flags = ["--num-prompts", "3", "--input-len", "4", "--output-len", "1", "--predict", "--save-result"]
        place = ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
        assert main(["bench", "serve", "--base-url", plain.url, *flags, *place]) == 0
        assert plain.asked["/server_info"]["authorization"] == "bearer sk-admin"
        assert plain.asked["/v1/models"]["authorization"] == plain.headers[0]["authorization"] == "bearer sk-1"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model_id"] == "theirs"
    assert result["predicted"]["median_ttft_ms"] > 0


def test_a_key_and_headers_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    with scripted(answer_of_one_token) as plain:
        flags = ["--model", "m", "--num-prompts", "1", "--header", "x-trace=7", "--extra-body", '{"seed": 5}']
        flags += ["--temperature", "0", "--metadata", "gpu=none", "--request-id-prefix", "mine-"]
        flags += ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"]
        for _ in range(2):
            assert main(["bench", "serve", "--base-url", plain.url, *flags]) == 0
        headers, body = plain.headers[0], plain.bodies[0]
    assert (headers["authorization"], headers["x-trace"], headers["x-request-id"]) == ("bearer sk-1", "7", "mine-0")
    assert {"model": "m", "temperature": 0, "seed": 5, "stream": True}.items() <= body.items()
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["gpu"] for line in lines] == ["none", "none"]
    assert "timelines_compared" not in lines[0]  # another server keeps none
    assert "ttfts" not in lines[0]


def test_nothing_answered_is_a_failure_in_the_servers_own_words(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """At an address as clients of OpenAI's API write it."""
    flags = ["--base-url", server.base_url + "/v1/", "--model", "another", "--num-prompts", "2"]
    assert main(["bench", "serve", *flags]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2: 2 x HTTP 404 model_not_found (The model `another` does not exist" in said
    assert "Time to first token" not in said


def test_a_server_that_starts_is_waited_for() -> None:
    pages: dict[str, object] = {}
    with scripted(answer_of_one_token, pages=pages) as plain:
        flags = ["--base-url", plain.url, "--num-prompts", "1", "--input-len", "1", "--output-len", "1"]
        assert main(["bench", "serve", *flags]) == 1
        threading.Timer(0.3, lambda: pages.update({"/v1/models": {"data": [{"id": "late"}]}})).start()
        assert main(["bench", "serve", *flags, "--ready-check-timeout-sec", "60"]) == 0
        assert plain.bodies[0]["model"] == "late"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goodput", "speed:3"], "--goodput: got 'speed:3'; allowed: ttft, tpot, e2el"),
        (["--goodput", "ttft"], "--goodput: got 'ttft'; allowed: ttft"),
        (["--metric-percentiles", "101"], "--metric-percentiles: got 101; allowed: 0 to 100"),
        (["--header", "x"], "--header: got 'x'; allowed: KEY=VALUE"),
        (["--base-url", "127.0.0.1:8000"], "--base-url: got '127.0.0.1:8000'"),
        (["--base-url", "http://127.0.0.1:99999"], "--base-url: got 'http://127.0.0.1:99999'"),
        (["--base-url", "http://[::1"], "--base-url: got 'http://[::1'"),
        (["--max-concurrency", "0"], "--max-concurrency: got 0"),
        (["--extra-body", '{"n": 200}', "--predict"], "--extra-body: got n=200; allowed with --predict: 1 to 128"),
        (["--extra-body", '{"n": "2"}', "--predict"], "--extra-body: got n='2'; allowed with --predict: 1 to 128"),
        (["--extra-body", '{"n": 2.5}', "--predict"], "--extra-body: got n=2.5; allowed with --predict: 1 to 128"),
        (["--input-len", "0"], "--input-len: got 0; allowed: more than 0"),
        (["--request-timeout", "nan"], "--request-timeout: got nan"),
        (["--header", "x=a\r\nb: c"], "--header: 'x' has characters that cannot be sent"),
        (["--save-result", "--result-dir", "/dev/null/a"], "--result-dir: cannot make /dev/null/a"),
        (["--num-promts", "3"], "Did you mean --num-prompts?"),
        (["--port", "9"], "No answer from 127.0.0.1:9"),
        (["--base-url", "http://127.0.0.1:99999"], "--base-url: got 'http://127.0.0.1:99999'; allowed: an http or"),
        (["--dataset-name", "custom", "--dataset-path", "none"], "--dataset-path: cannot read none: No such file"),
        (["--dataset-name", "custom", "--dataset-path", __file__], "is wrong: JSONDecodeError("),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [("--extra-body", "{", "a JSON object"), ("--html", "/none/a.html", "a file in a folder")],
)
def test_a_value_that_cannot_be_is_told_at_once(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", flag, value])
    assert left.value.code == 2
    assert f"argument {flag}: got " in (error := capsys.readouterr().err)
    assert f"allowed: {said}" in error


def test_help_names_the_flags_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--help"])
    assert left.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert known >= set(VLLM_FLAGS.split())
