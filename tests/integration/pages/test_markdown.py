"""What the chat makes of a model's Markdown, in a real browser: elements, and never HTML."""

from __future__ import annotations

from playwright.sync_api import Browser

from tests.support.harness import Server
from tests.support.pages import looking


def test_markdown_becomes_elements_and_never_html(browser: Browser, open_server: Server) -> None:
    source = (
        "# Title\n\n**bold** and `a < b` and [good](https://example.com) and [bad](javascript:alert(1))\n\n"
        "- one\n- two\n  - three\n\n```py\nx = '<script>'\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n"
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\n\n> quoted"
    )
    with looking(browser, open_server, "/dashboard") as page:
        html = page.evaluate(
            """async (source) => {
                const { markdown } = await import("/dashboard/files/markdown.js");
                const place = document.createElement("div");
                place.append(markdown(source));
                document.body.append(place);
                return place.innerHTML;
            }""",
            source,
        )
        assert page.evaluate("window.hacked") is None
    for expected in (
        *("<h3>Title</h3>", "<strong>bold</strong>", "<code>a &lt; b</code>", 'href="https://example.com"'),
        *("<li>one</li>", "<td>2</td>", ">'&lt;script&gt;'</span>", "<blockquote>", "[bad](javascript:alert(1)"),
    ):
        assert expected in html
    assert "<script" not in html
    assert "<img" not in html


def test_markdown_takes_time_in_proportion_to_its_length(browser: Browser, open_server: Server) -> None:
    """Runs of backticks that nothing closes, and other beginnings without an end: four times the text, and less than
    three times that for the noise. It was 64 times the time, and a minute."""
    with looking(browser, open_server, "/dashboard") as page:
        ratios = page.evaluate(
            """async () => {
                const { markdown } = await import("/dashboard/files/markdown.js");
                const ticks = (index) => "`".repeat(index % 90 + 1) + "a";
                const seconds = (text) => {
                    const began = performance.now();
                    markdown(text);
                    return performance.now() - began;
                };
                const kinds = [
                    (count) => Array.from({ length: count }, (_, index) => ticks(index)).join(" "),
                    (count) => "`".repeat(20 * count),
                    (count) => "[".repeat(count),
                    (count) => "**a [".repeat(count) + "|",
                ];
                return kinds.map((kind) => {
                    const least = (text) => Math.min(...[1, 2, 3].map(() => seconds(text)));
                    return least(kind(16000)) / Math.max(least(kind(4000)), 1);
                });
            }"""
        )
    assert max(ratios) < 12, ratios


def test_code_is_what_a_run_of_as_many_backticks_closes(browser: Browser, open_server: Server) -> None:
    source = "``a ` b`` and `c ** d` and **e** and ```f and `g` and \\* and ~~h~~ and *i* and __j `k` l__"
    with looking(browser, open_server, "/dashboard") as page:
        html = page.evaluate(
            """async (source) => {
                const { markdown } = await import("/dashboard/files/markdown.js");
                const place = document.createElement("div");
                place.append(markdown(source));
                return place.innerHTML;
            }""",
            source,
        )
    assert html == (
        "<p><code>a ` b</code> and <code>c ** d</code> and <strong>e</strong> and ```f and <code>g</code> and * and "
        "<s>h</s> and <em>i</em> and <strong>j <code>k</code> l</strong></p>"
    )
