"""The server's pages in Debian's chromium.

A page that is opened by `looking` ends with two questions: has the console complained, and has anything been loaded
from elsewhere?
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.support.harness import REPOSITORY, Server

PATIENCE = 60_000  # milliseconds
DESK: ViewportSize = {"width": 1280, "height": 720}
PHONE: ViewportSize = {"width": 390, "height": 844}
AXE = REPOSITORY / "tests" / "integration" / "npm" / "node_modules" / "axe-core" / "axe.min.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without pages."""
    executable = shutil.which("chromium")
    assert executable, "make test-integration installs chromium"
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"]) as running,
    ):
        yield running


@contextmanager
def looking(
    browser: Browser, server: Server, path: str, *, allowed: str = "", size: ViewportSize = DESK
) -> Iterator[Page]:
    """A page of its own. `allowed` is a part of what the console may complain of."""
    context = browser.new_context(viewport=size)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.base_url + path)
    yield page
    context.close()
    assert [each for each in complaints if not (allowed and allowed in each)] == []
    assert [url for url in asked if not url.startswith((server.base_url, "data:", "blob:"))] == []


def expect_no_violations(page: Page) -> None:
    """axe-core finds nothing on the page as it is now."""
    page.evaluate(AXE.read_text() + "; null")
    found = page.evaluate("axe.run().then(({ violations }) => violations)")
    places = {each["id"]: [node["html"][:200] for node in each["nodes"]] for each in found}
    assert not places, json.dumps(places, indent=1)
