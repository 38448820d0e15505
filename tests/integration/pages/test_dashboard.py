"""The pages in a real browser, Debian's chromium: what they show is what the server does, and nothing without a key.

Every page that is opened here ends with the same two questions: has the console complained, and has anything been
loaded from elsewhere?
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.harness import Server
from tests.support.pages import PATIENCE, looking
from tests.support.tiny_model import tiny_server, write_tiny_model

LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@contextmanager
def streaming(server: Server, **fields: object) -> Iterator[Iterator[str]]:
    """A client that reads until it is done with, and then leaves."""
    headers = {"x-request-id": "killed"}
    with (
        httpx.Client(base_url=server.base_url, timeout=None, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=LONG | fields, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield lines


def step_of(page: Page) -> int:
    return int(page.locator("#live canvas.lanes").get_attribute("data-step") or 0)


def test_live_lanes_move_and_a_killed_clients_row_ends(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page:
        rows = page.locator("#live ul[aria-label=Running] .request")
        with streaming(open_server):
            expect(rows).to_have_count(1, timeout=PATIENCE)
            before = step_of(page)
            open_server.poll(lambda: step_of(page), lambda step: step > before + 20, 0.05)
            rows.first.click()
            expect(page.locator("#live .details")).to_contain_text("running")
        expect(rows).to_have_count(0, timeout=PATIENCE)
        expect(page.locator("#live .reasons")).to_contain_text("1 aborted", timeout=PATIENCE)
        expect(page.locator("#live .details")).to_contain_text("aborted")
        # The step after the one in which it left is its last.
        page.get_by_role("button", name="Pause").click()
        stopped = step_of(page)
        page.keyboard.press("ArrowLeft")
        open_server.poll(lambda: step_of(page), lambda step: step == stopped - 1, 0.05)
        page.get_by_role("button", name="Resume").click()


def test_live_says_why_a_request_waits(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page, streaming(open_server, n=6, temperature=1.0):
        waiting = page.locator("#live ul[aria-label=Waiting] .request")
        expect(waiting).to_have_count(2, timeout=PATIENCE)
        expect(waiting.first).to_contain_text("no slot")


def test_a_page_that_is_closed_makes_room_for_another(open_server: Server) -> None:
    with httpx.Client(base_url=open_server.base_url, timeout=60, trust_env=False) as client:
        answers = [client.send(client.build_request("GET", "/dashboard/frames"), stream=True) for _ in range(16)]
        assert [answer.status_code for answer in answers] == [200] * 16
        refused = client.get("/dashboard/frames")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_pages")
        for answer in answers:
            answer.close()
    again = open_server.poll(lambda: _first_frame(open_server), lambda frame: frame is not None, 0.1)
    assert again is not None
    assert again["object"] == "frame"


def _first_frame(server: Server) -> dict | None:
    with server.client.stream("GET", "/dashboard/frames") as answer:
        if answer.status_code != 200:
            return None
        data = next(line for line in answer.iter_lines() if line.startswith("data:"))
        return json.loads(data.removeprefix("data:"))


def test_a_feed_ends_when_the_server_stops() -> None:
    with tiny_server() as server:
        server.wait_ready()
        lines: list[str] = []
        looks = threading.Event()

        def follow() -> None:
            with httpx.stream("GET", server.base_url + "/dashboard/frames", timeout=60, trust_env=False) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    looks.set()

        reader = threading.Thread(target=follow)
        reader.start()
        assert looks.wait(60)
        assert server.stop() == 0
        reader.join(60)
        assert lines[-3:] == ["event: end", "data: {}", ""]


def test_without_a_key_the_page_shows_nothing(browser: Browser, governed_server: Server) -> None:
    with looking(browser, governed_server, "/dashboard#live", allowed="401") as page:
        expect(page.locator("#live > .notice")).to_contain_text("admin keys is needed", timeout=PATIENCE)
        expect(page.locator("#live .view")).to_be_hidden()
        page.get_by_role("button", name="Enter a key").click()
        page.fill("#client-key", "client")
        page.fill("#admin-key", "client")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#live > .notice")).to_contain_text(
            "The admin key that was entered is wrong", timeout=PATIENCE
        )
        page.get_by_role("button", name="Enter a key").click()
        page.fill("#admin-key", "operator")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#live .view")).to_be_visible(timeout=PATIENCE)
    anonymous = httpx.Client(base_url=governed_server.base_url, trust_env=False)
    for path in ("/dashboard/frames", "/openapi.json", "/dashboard/", "/docs/", "/dashboard/files"):
        assert anonymous.get(path).status_code == 401, path
    for path in ("/dashboard", "/docs", "/dashboard/files/app.js", "/docs/files/docs.js"):
        assert anonymous.get(path).status_code == 200, path
    frames = httpx.get(governed_server.base_url + "/dashboard/frames", headers={"x-api-key": "client"}, trust_env=False)
    assert frames.status_code == 401


def test_clients_keys_open_no_feed_where_there_are_no_administrators() -> None:
    with tiny_server(api_keys="client") as server:
        answer = server.poll(lambda: server.get_or_none("/dashboard/frames"), lambda each: each is not None, 0.05)
        assert answer is not None
        assert answer.status_code == 401
        assert "admin_keys" in answer.json()["error"]["message"]


def test_a_browser_arrives_at_the_page_and_programs_at_a_text(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/") as page:
        assert page.url.endswith("/dashboard")
    answer = open_server.client.get("/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")


def test_files_are_asked_for_again_by_their_digest(open_server: Server) -> None:
    for path in ("/dashboard", "/dashboard/files/app.js", "/dashboard/files/style.css", "/docs/files/swagger-ui.css"):
        first = open_server.client.get(path)
        assert first.status_code == 200
        assert "default-src 'none'" in first.headers["content-security-policy"]
        assert first.headers["x-content-type-options"] == "nosniff"
        again = open_server.client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/dashboard/files/..%2f__init__.py", "/dashboard/files/frames.py", "/docs/files/LICENSE"):
        assert open_server.client.get(path).status_code == 404


def test_rates_fall_to_none_on_an_idle_server(browser: Browser, open_server: Server) -> None:
    with streaming(open_server), open_server.client.stream("GET", "/dashboard/frames") as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data:"))
        busy = [json.loads(next(lines)) for _ in range(4)]
    last = busy[-1]
    none = {"steps": [], "requests": [], "running": [], "num_running": 0}
    idle = [{**last, **none, "time": last["time"] + seconds} for seconds in (3, 30)]
    with looking(browser, open_server, "/dashboard") as page:
        rates = page.evaluate(
            """async (frames) => {
                const { View } = await import("/dashboard/files/view.js");
                const place = document.createElement("div");
                const view = new View(place);
                return frames.map((frame) => {
                    view.push(frame);
                    view.draw();
                    const found = [...place.querySelectorAll("dt")].find((each) => each.textContent === "Decode");
                    return parseFloat(found.nextSibling.textContent.replaceAll(",", ""));
                });
            }""",
            [*busy, *idle],
        )
    assert rates[3] > rates[4] > rates[5] == 0, rates


def test_docs_try_it_works_with_keys(browser: Browser, governed_server: Server) -> None:
    with looking(browser, governed_server, "/docs", allowed="401") as page:
        page.fill("#client", "client")
        page.fill("#admin", "operator")
        page.get_by_role("button", name="Use them").click()
        for path, said in (("/v1/models", '"object": "list"'), ("/server_info", '"vocab_size"')):
            operation = page.locator(".opblock", has=page.locator(f"[data-path='{path}']"))
            operation.locator(".opblock-summary-control").click()
            operation.get_by_role("button", name="Try it out").click()
            operation.get_by_role("button", name="Execute").click()
            expect(operation.locator(".live-responses-table")).to_contain_text(said, timeout=PATIENCE)


def test_play_opens_a_file_of_frames(browser: Browser, open_server: Server, tmp_path: Path) -> None:
    with streaming(open_server), open_server.client.stream("GET", "/dashboard/frames") as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data:"))
        recorded = [next(lines) for _ in range(12)]
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(recorded) + "\n")
    with looking(browser, open_server, "/dashboard#play") as page:
        page.set_input_files("#play input[type=file]", path)
        last = json.loads(recorded[-1])["steps"][-1]["step"]
        expect(page.locator("#play .lanes")).to_have_attribute("data-step", str(last))
        nonsense = tmp_path / "nonsense.jsonl"
        nonsense.write_text("nonsense\n")
        page.set_input_files("#play input[type=file]", nonsense)
        expect(page.locator("#play .notice")).to_contain_text("line 1 is not JSON")


def simulated(server: Server, **piece: object) -> httpx.Response:
    return server.client.post("/dashboard/simulation", json=piece)


def test_a_simulation_ends_that_has_more_requests_than_are_kept(open_server: Server) -> None:
    since = 0.0
    for _ in range(60):  # a client goes on where the answer before ended
        piece = {"until": 1e6, "since": since, "parameters": {"rate": 1000, "step_seconds": 10}}
        answer = simulated(open_server, **piece)
        if answer.status_code == 400:
            break
        since = answer.json()["time"]
    assert "are unfinished" in answer.json()["error"]["message"]


def test_the_simulators_presets_and_sliders_work(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#simulate") as page:
        figure = page.locator("#simulate .figures")
        page.get_by_role("button", name="Overloaded").click()
        page.locator("#simulate select").select_option("20")
        expect(figure).to_contain_text("100 %", timeout=PATIENCE)
        expect(page.get_by_role("slider", name="Slots")).to_have_value("4")
        page.get_by_role("slider", name="Slots").fill("16")
        expect(figure.locator("div", has_text="Queue").locator("dd")).to_have_text("0", timeout=PATIENCE)
        page.get_by_role("button", name="Pause").click()
        clock = page.locator("#simulate .where")
        before = clock.inner_text()
        page.get_by_role("button", name="One step").click()
        expect(clock).not_to_have_text(before)


def test_the_same_simulation_has_the_same_answer(open_server: Server) -> None:
    asked = {"parameters": {"rate": 20, "max_num_seqs": 2}, "changes": [{"at": 0.5, "parameters": {"max_num_seqs": 6}}]}
    first = simulated(open_server, **asked, until=0.5).json()
    assert first["time"] == 0.5
    assert "one slot" in first["presets"]
    second = simulated(open_server, **asked, since=0.5, until=1.2).json()
    assert second["parameters"]["max_num_seqs"] == 6
    again = simulated(open_server, **asked, since=0.5, until=1.2).json()  # which nothing is kept for any more
    assert again == second
    assert second["frame"]["steps"]
    assert second["frame"]["limits"]["max_num_seqs"] == 6


@pytest.mark.parametrize(
    "piece",
    [
        {},
        {"until": -1},
        {"until": 1, "max_steps": 101},
        {"until": 1, "parameters": {"rate": 1e9}},
        {"until": 1, "parameters": {"nonsense": 1}},
        {"until": 2, "since": 1, "changes": [{"at": 0.5, "parameters": {"seed": 3}}]},
        {"until": 1, "changes": [{"at": 0, "parameters": {}}] * 300},
        {"until": 1, "changes": [{"at": 0, "parameters": {"self": 1}}]},
        {"until": 1e6, "since": 999_999, "parameters": {"rate": 20, "max_num_seqs": 64}},
    ],
)
def test_a_simulation_that_cannot_be_is_refused(open_server: Server, piece: dict[str, object]) -> None:
    answer = simulated(open_server, **piece)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_several_models_are_shown_with_their_states_loaded_and_unloaded(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tiny_model(tmp_path / name, vocab_size=512)
    settings: dict[str, Any] = {
        "model": "",
        "max_model_len": "",
        "models_dir": tmp_path,
        "admin_keys": "operator",
        "dtype": "float32",
    }
    with tiny_server(**settings) as server, looking(browser, server.wait_ready(), "/dashboard", allowed="503") as page:
        page.evaluate("sessionStorage.setItem('key-admin', 'operator')")
        page.goto(server.base_url + "/dashboard#live")
        page.reload()
        row = page.locator("#live .models tbody tr").filter(has_text="second")
        expect(row).to_contain_text("unloaded")
        row.get_by_role("button", name="load second").click()
        expect(row).to_contain_text("MiB", timeout=PATIENCE)
        row.get_by_role("button", name="unload second").click()
        expect(row).to_contain_text("unloaded", timeout=PATIENCE)
        page.goto(server.base_url + "/dashboard#chat")
        expect(page.get_by_label("Model", exact=True).locator("option")).to_have_count(2)
