"""A page of another origin in a real browser, Debian's chromium: what `allowed_origins` lets it send and read."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Error, Page, sync_playwright

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

KEY = "sk-page"
ASK = """async ([url, key, fields]) => {
    const answer = await fetch(url + "/v1/completions", {
        method: "POST",
        headers: {"authorization": "Bearer " + key, "content-type": "application/json", "x-stainless-lang": "js"},
        body: JSON.stringify({prompt: "Hi", max_tokens: 5, ignore_eos: true, ...fields}),
    });
    return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
}"""


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>A page</title>")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def origins() -> Iterator[tuple[str, str]]:
    """Two origins that have a page."""
    sites = [ThreadingHTTPServer(("127.0.0.1", 0), _Blank) for _ in range(2)]
    for site in sites:
        threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{sites[0].server_port}", f"http://127.0.0.1:{sites[1].server_port}"
    for site in sites:
        site.shutdown()


@pytest.fixture(scope="module")
def server(origins: tuple[str, str]) -> Iterator[Server]:
    with tiny_server(allowed_origins=origins[0], api_keys=KEY) as running:
        yield running.wait_ready()


@pytest.fixture
def page() -> Iterator[Page]:
    executable = shutil.which("chromium")
    assert executable, "make test installs chromium"
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"]) as browser,
    ):
        yield browser.new_page()


def test_a_page_of_an_allowed_origin_asks_and_reads_and_no_other(
    server: Server, origins: tuple[str, str], page: Page
) -> None:
    def ask(key: str = KEY, **fields: Any) -> Any:
        return page.evaluate(ASK, [server.base_url, key, fields])

    page.goto(origins[0])
    status, request_id, text = ask()
    assert (status, bool(request_id)) == (200, True), "the page reads headers, too"
    assert '"completion_tokens":5' in text
    assert ask(stream=True)[2].endswith("data: [DONE]\n\n")
    status, _, text = ask(key="wrong")
    assert status == 401
    assert "invalid_api_key" in text
    assert ask(max_tokens=-7)[0] == 400
    page.goto(origins[1])
    with pytest.raises(Error, match="Failed to fetch"):
        ask()
    page.goto(server.base_url + "/docs")
    assert ask()[0] == 200, "its own pages need no permission"
