"""The dashboard's live view, simulator and player in a real browser: what each of them promises to a person."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.integration.pages.test_dashboard import streaming
from tests.support.harness import Server
from tests.support.pages import DESK, PATIENCE, PHONE, expect_no_violations, looking
from tests.support.tiny_model import tiny_server, write_tiny_model

TENANTS = {"red": "key-red", "blue": "key-blue"}
SPY = """() => {
    window.written = [];
    window.alphas = new Set();
    const { fillText, fillRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (words, ...rest) {
        window.written.push([this.canvas.className, words]);
        return fillText.call(this, words, ...rest);
    };
    CanvasRenderingContext2D.prototype.fillRect = function (...rest) {
        window.alphas.add(this.globalAlpha);
        return fillRect.call(this, ...rest);
    };
}"""


def work(server: Server, **fields: object) -> None:
    server.client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 64, "ignore_eos": True} | fields)


def until(page: Page, expression: str, argument: object = None) -> None:
    """Wait until a function of JavaScript returns true; the page's policy forbids Playwright's own way."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def written(page: Page, canvas: str) -> list[str]:
    """The texts that were drawn into the canvases of this class since the last call."""
    found: list[str] = page.evaluate(
        """(name) => {
            const mine = window.written.filter(([where]) => where === name).map(([, words]) => words);
            window.written = [];
            return mine;
        }""",
        canvas,
    )
    return found


def test_a_page_that_is_opened_late_has_a_past(browser: Browser, open_server: Server) -> None:
    work(open_server)
    time.sleep(6)  # until the server has looked again
    with looking(browser, open_server, "/dashboard#live") as page:
        expect(page.locator("#live .chart")).to_have_count(6)
        tokens = page.get_by_role(
            "img", name=re.compile("Tokens per second: .* [1-9][0-9.]* at most in the last 15 min")
        )
        expect(tokens).to_be_visible(timeout=PATIENCE)
        first = page.get_by_role("img", name=re.compile("Time to first token: p50 .* m?s at most in the last 15 min"))
        expect(first).to_be_visible()
        for words in ("−15 min", "−5 min", "now"):
            expect(tokens).to_contain_text(words)
        page.get_by_role("button", name="24 h").click()
        expect(page.get_by_role("img", name=re.compile("Tokens per second.*24 h"))).to_contain_text("−24 h")


def test_what_a_chart_has_at_a_time_is_shown_where_one_points(browser: Browser, open_server: Server) -> None:
    work(open_server)
    with looking(browser, open_server, "/dashboard#live") as page:
        plot = page.locator("#live .plot").first
        expect(plot).to_be_visible(timeout=PATIENCE)
        box = plot.bounding_box()
        assert box is not None
        plot.hover(position={"x": box["width"] - 8, "y": 30})
        expect(page.locator("#live .panel .where").first).to_contain_text("ago")
        expect(page.locator("#live .plot .pointed")).to_have_count(6)


def test_the_page_says_what_is_served(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page:
        served = page.locator("#live .served")
        for words in ("Model tiny", "Headrace", "Up", "Device cpu", "Threads", "Context 8,192 tokens", "Slots 4"):
            expect(served).to_contain_text(re.compile(words.replace(" ", r"\s*")), timeout=PATIENCE)


def test_the_page_says_whether_the_service_is_healthy(browser: Browser) -> None:
    with (
        tiny_server(max_num_seqs=2, max_queued_requests=4) as server,
        looking(browser, server.wait_ready(), "/dashboard#live") as page,
    ):
        health = page.locator("#live .health")
        expect(health).to_have_text("Idle: nothing runs, nothing waits.", timeout=PATIENCE)
        with streaming(server):
            expect(health).to_have_text("Healthy: 1 of 2 slots run, nothing waits.", timeout=PATIENCE)
            with streaming(server, n=3, temperature=1.0):
                expect(health).to_contain_text("Overloaded: 2 of 2 slots run, 2 wait, oldest waits", timeout=PATIENCE)
                oldest = page.locator("#live .figures div", has_text="Waiting").locator("small")
                expect(oldest).to_have_text(re.compile(r"oldest ([5-9]\.\d|\d\d) s"))
                for _ in range(3):
                    server.client.post("/v1/completions", json={"prompt": "a", "n": 4, "max_tokens": 9})
                expect(health).to_contain_text("Refusing", timeout=PATIENCE)
                expect(health).to_contain_text("3 (max queued requests)")
        expect(health).to_contain_text("nothing runs, nothing waits", timeout=PATIENCE)


def test_lanes_have_a_scale_and_a_time_axis_that_marks_idle_times(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page:
        page.evaluate(SPY)
        work(open_server)
        time.sleep(2)
        work(open_server)
        page.wait_for_timeout(500)
        labels = set(written(page, "lanes"))
        assert {"0", "80 ms"} <= labels
        assert any(re.fullmatch(r"−\d.* s", each) for each in labels), labels
        assert any(re.fullmatch(r"idle [\d.]+ s", each) for each in labels), labels


def test_pointing_at_a_step_explains_it_in_a_sentence(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page:
        lanes, words = page.locator("#live canvas.lanes"), page.locator("#live .explained")
        expect(words).to_contain_text("Point at a step")
        with streaming(open_server, n=2, temperature=1.0):
            expect(page.locator("#live ul[aria-label=Running] .request")).to_have_count(2, timeout=PATIENCE)
            found, deadline = "", time.monotonic() + PATIENCE / 1000
            while not re.search(r"Step [\d,]+ took .* computed the next token of 2 requests\.", found):
                assert time.monotonic() < deadline, found
                page.wait_for_timeout(200)
                lanes.hover(position={"x": 1000 - time.monotonic() % 100, "y": 30})
                found = words.inner_text()
            page.mouse.move(1, 1)
            page.get_by_role("button", name="Pause").click()
            expect(words).to_contain_text(re.compile(r"Step [\d,]+ took"))


def test_a_request_is_aborted_on_the_page_with_an_admin_key_and_no_other_is(browser: Browser) -> None:
    keys = {name: {"authorization": f"Bearer {key}"} for name, key in TENANTS.items()}
    settings: dict[str, Any] = {"api_keys": ",".join(TENANTS.values()), "admin_keys": "operator", "max_num_seqs": 4}
    with (
        tiny_server(**settings) as server,
        looking(browser, server.wait_ready(), "/dashboard", allowed="401") as page,
        httpx.Client(base_url=server.base_url, timeout=None, trust_env=False) as client,
    ):
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        open_answers = [
            client.send(client.build_request("POST", "/v1/completions", json=body, headers=keys[name]), stream=True)
            for name in TENANTS
        ]
        page.evaluate("sessionStorage.setItem('key-admin', 'operator')")
        page.goto(server.base_url + "/dashboard#live")
        rows, tenants = page.locator("#live ul[aria-label=Running] .request"), page.locator("#live button.tenant")
        expect(rows).to_have_count(2, timeout=PATIENCE)
        expect(tenants).to_have_count(2)
        tenants.first.click()
        expect(rows).to_have_count(1)
        tenants.first.click()
        expect(rows).to_have_count(2)
        rows.first.click()
        details = page.locator("#live .details")
        expect(details.locator(".timeline span.decode").first).to_be_visible(timeout=PATIENCE)
        page.get_by_role("button", name="Abort", exact=True).click()
        expect(rows).to_have_count(2)  # one click is not enough
        page.get_by_role("button", name="Abort it, really").click()
        expect(rows).to_have_count(1, timeout=PATIENCE)
        expect(details).to_contain_text(re.compile("aborted|has left"), timeout=PATIENCE)
        expect(page.get_by_role("button", name="Abort", exact=True)).to_be_hidden()
        for answer in open_answers:
            answer.close()


def test_a_page_does_not_ask_again_with_a_key_that_was_refused(browser: Browser, governed_server: Server) -> None:
    with looking(browser, governed_server, "/dashboard", allowed="401") as page:
        page.evaluate("sessionStorage.setItem('key-admin', 'operator')")
        refused: list[str] = []
        page.on("response", lambda answer: refused.append(answer.url) if answer.status == 401 else None)
        page.goto(governed_server.base_url + "/dashboard#live")
        page.reload()
        expect(page.locator("#live .view")).to_be_visible(timeout=PATIENCE)
        refused.clear()
        page.wait_for_timeout(6000)
        assert len(refused) <= 1, refused


def test_each_of_several_models_has_charts_of_its_own(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tiny_model(tmp_path / name, vocab_size=512)
    settings: dict[str, Any] = {"model": "", "max_model_len": "", "models_dir": tmp_path, "dtype": "float32"}
    with (
        tiny_server(**settings) as server,
        looking(browser, server.wait_ready(), "/dashboard", allowed="503") as page,
    ):
        for name in ("first", "second"):
            work(server, model=name)
        time.sleep(6)
        page.goto(server.base_url + "/dashboard#live")
        page.reload()
        models = page.get_by_label("Model of the charts")
        expect(models.locator("option")).to_have_count(2, timeout=PATIENCE)
        for name in ("first", "second"):
            models.select_option(name)
            expect(page.get_by_role("img", name=re.compile("generated .* [1-9][0-9.]* at most"))).to_be_visible()
            expect(page.locator("#live .served")).to_contain_text(name)


def test_without_administrators_the_page_says_why_nothing_is_aborted(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page, streaming(open_server):
        page.locator("#live ul[aria-label=Running] .request").first.click()
        page.get_by_role("button", name="Abort", exact=True).click()
        page.get_by_role("button", name="Abort it, really").click()
        expect(page.locator("#live .details")).to_contain_text("HEADRACE_ADMIN_KEYS")


def test_a_selected_request_that_has_left_dims_no_lanes(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#live") as page:
        page.evaluate(SPY)
        rows = page.locator("#live ul[aria-label=Running] .request")
        with streaming(open_server):
            expect(rows).to_have_count(1, timeout=PATIENCE)
            stays = rows.locator("code").inner_text()
            with streaming(open_server):
                expect(rows).to_have_count(2, timeout=PATIENCE)
                page.locator("#live ul[aria-label=Running] .request", has_not_text=stays).click()
                until(page, "() => window.alphas.has(0.35)")
            expect(rows).to_have_count(1, timeout=PATIENCE)
            page.evaluate("window.alphas.clear()")
            page.wait_for_timeout(1000)
            assert 0.35 not in page.evaluate("[...window.alphas]")
            assert page.locator("#live .request[aria-pressed=true]").count() == 0


def test_canvases_follow_the_theme_at_once(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#simulate") as page:
        expect(page.locator("#simulate .figures")).to_contain_text("Queue", timeout=PATIENCE)
        pixels = "document.querySelector('#simulate canvas.arrivals').toDataURL()"
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(300)
        light = page.evaluate(pixels)
        page.emulate_media(color_scheme="dark")
        until(page, f"(light) => {pixels} !== light", light)


def test_simulated_charts_have_numbers_on_their_axes(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#simulate") as page:
        page.evaluate(SPY)
        page.locator("#simulate select").select_option("20")
        page.get_by_role("button", name="Overloaded").click()
        expect(page.locator("#simulate .lesson")).to_contain_text("the queue grows without bound")
        until(page, "() => window.written.some(([where, words]) => where === 'outputs' && /^[1-9]\\d* s$/.test(words))")
        for canvas in ("arrivals", "outputs"):
            page.evaluate("window.written = []")
            page.wait_for_timeout(500)
            labels = set(written(page, canvas))
            assert "0" in labels
            assert any(re.fullmatch(r"\d+ s", each) for each in labels), labels
            assert len(labels) >= 4, labels
        for preset in ("Comfortable", "One at a time", "Everyone at once", "Long documents"):
            page.get_by_role("button", name=preset).click()
            expect(page.locator("#simulate .lesson")).not_to_be_empty()


def test_the_last_simulation_is_at_hand_to_be_played(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard#play") as page:
        play = page.get_by_role("button", name="Play the last simulation")
        expect(play).to_be_disabled()
        page.get_by_role("tab", name="Simulate").click()
        page.get_by_role("button", name="Comfortable").click()
        page.wait_for_timeout(1500)
        page.get_by_role("tab", name="Play").click()
        play.click()
        expect(page.locator("#play .figures")).to_contain_text("of 8", timeout=PATIENCE)
        expect(page.locator("#play .lanes")).to_be_visible()
        assert page.locator("#play button", has_text="Abort").is_hidden()


def test_a_recording_is_dropped_onto_the_page(browser: Browser, open_server: Server) -> None:
    with streaming(open_server), open_server.client.stream("GET", "/dashboard/frames") as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data:"))
        recorded = [next(lines) for _ in range(12)]
    with looking(browser, open_server, "/dashboard#play") as page:
        content = base64.b64encode("\n".join(recorded).encode()).decode()
        page.evaluate(
            """(content) => {
                const given = new DataTransfer();
                given.items.add(new File([atob(content)], "recorded.jsonl"));
                const zone = document.querySelector("#play .drop");
                for (const kind of ["dragover", "drop"]) {
                    zone.dispatchEvent(new DragEvent(kind, { dataTransfer: given, bubbles: true, cancelable: true }));
                }
            }""",
            content,
        )
        last = json.loads(recorded[-1])["steps"][-1]["step"]
        expect(page.locator("#play .lanes")).to_have_attribute("data-step", str(last), timeout=PATIENCE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing(browser: Browser, open_server: Server, scheme: str, size: ViewportSize) -> None:
    with looking(browser, open_server, "/dashboard#live", size=size) as page, streaming(open_server):
        page.evaluate("scheme => window.theme.choose(scheme)", scheme)
        page.locator("#live ul[aria-label=Running] .request").first.click()
        expect(page.locator("#live .served")).to_be_visible(timeout=PATIENCE)
        page.get_by_role("button", name="Abort", exact=True).click()
        expect_no_violations(page)
        page.get_by_role("tab", name="Play").click()
        expect_no_violations(page)
        page.get_by_role("tab", name="Simulate").click()
        page.get_by_role("button", name="Overloaded").click()
        expect(page.locator("#simulate .lesson")).to_contain_text("grows")
        page.wait_for_timeout(1000)
        expect_no_violations(page)
        page.get_by_role("tab", name="Play").click()
        page.get_by_role("button", name="Play the last simulation").click()
        expect(page.locator("#play .figures")).to_be_visible()
        expect_no_violations(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
