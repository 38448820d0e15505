"""The locust file as its README runs it, against a server that fails now and then."""

import itertools
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def event(**data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class Handler(BaseHTTPRequestHandler):
    """Every fifth request is refused, and every fifth after the third ends in an error frame."""

    numbers = itertools.count()
    bodies: list[dict] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        number = next(self.numbers)
        if number % 5 == 0:
            body = b'{"error": {"message": "The queue is full."}}'
            self.send_response(429)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(4):
            self.wfile.write(event(choices=[{"delta": {"content": "x"}, "finish_reason": None}]))
        if number % 5 == 3:
            self.wfile.write(event(error={"message": "The request failed."}) + b"data: [DONE]\n\n")
            return
        self.wfile.write(event(choices=[{"delta": {}, "finish_reason": "length"}]))
        self.wfile.write(event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}) + b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def host():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(host: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-H", host, "-t", "10m"]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_run_is_bounded_in_count_and_names_its_failures(host):
    options = ["--model", "m", "--max-tokens", "4", "--prompt-mix", "5:1"]
    result = run(host, "-u", "2", "-r", "2", "--max-requests", "20", *options)
    assert result.returncode == 1, result.stderr  # locust's sign that something failed
    shown = result.stderr + result.stdout
    for kind, count, failed in (("SSE", 20, 8), ("TTFT", 12, 0), ("ITL", 36, 0), ("tok/s", 12, 0)):
        assert re.search(rf"^{kind} +chat, 5 words +{count} +{failed}\(", shown, re.MULTILINE), (kind, shown)
    assert re.search(r"^4 +SSE chat, 5 words: .*The queue is full", shown, re.MULTILINE), shown
    assert re.search(r"^4 +SSE chat, 5 words: .*The request failed", shown, re.MULTILINE), shown
    assert len(Handler.bodies) == 20
    for body in Handler.bodies:
        assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 4, True)
        assert len(body["messages"][0]["content"].split()) == 1 + 5
    assert len({body["messages"][0]["content"] for body in Handler.bodies}) == 20


@pytest.mark.slow
def test_a_mix_that_cannot_be_read_says_what_can(host):
    result = run(host, "--prompt-mix", "long")
    assert result.returncode == 2
    assert "32:6,256:3,700:1" in result.stderr
