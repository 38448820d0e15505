"""Tests that the chat renders a model's Markdown as elements, in a real browser, and never as HTML."""

from __future__ import annotations

import re
from html import unescape

import pytest
from playwright.sync_api import Browser, Page

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


def rendered(page: Page, source: str) -> str:
    """Return the HTML of what is made of a Markdown text."""
    return str(
        page.evaluate(
            """async (source) => {
                const { markdown } = await import("/dashboard/files/markdown.js");
                const place = document.createElement("div");
                place.append(markdown(source));
                return place.innerHTML;
            }""",
            source,
        )
    )


def test_code_has_its_language_and_colours(browser: Browser, open_server: Server) -> None:
    samples = {
        "python": (
            'def f():  # why\n    return "a" + 1',
            ["keyword", "call", "comment", "keyword", "string", "number"],
        ),
        "js": ("const f = `a`; // why", ["keyword", "string", "comment"]),
        "json": ('{"a": "b", "c": true}', ["key", "string", "key", "keyword"]),
        "bash": ('echo "$HOME" # why', ["keyword", "string", "comment"]),
        "sql": ("SELECT a FROM t -- why", ["keyword", "keyword", "comment"]),
        "diff": ("-old\n+new", ["removed", "added"]),
        "cpp": (
            "#include <a>\nint x = 0x1F; /* why\nstill */ return",
            [*("keyword", "keyword", "number", "comment", "keyword")],
        ),
        "unheard-of": ("return 1", []),
    }
    with looking(browser, open_server, "/dashboard") as page:
        for language, (code, kinds) in samples.items():
            html = rendered(page, f"```{language}\n{code}\n```")
            assert f"<span>{language}</span>" in html
            inner = html.partition("<code>")[2].partition("</code>")[0]
            assert re.findall(r'<span class="(\w+)">', inner) == kinds, language
            assert unescape(re.sub("<[^>]+>", "", inner)) == code


def test_lists_tables_and_tasks_are_laid_out(browser: Browser, open_server: Server) -> None:
    source = (
        "- [x] done\n- [ ] open\n\n3. three\n\n   ```py\n   if x:\n       y\n   ```\n\n4. four\n\n"
        "| a | b | c |\n|:-|-:|:-:|\n| `x|y` | 1 \\| 2 | *z* |\n\nline<br>break\nnext"
    )
    with looking(browser, open_server, "/dashboard") as page:
        html = rendered(page, source)
        wide = rendered(page, "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n" + "|b\n" * 2000)
        assert (wide.count("<th>"), wide.count("<td>")) == (2000, 2000)
    for expected in (
        *('aria-label="done"', 'aria-label="to do"', '<ol start="3">', '<td class="left"><code>x|y</code></td>'),
        *('<td class="right">1 | 2</td>', '<th class="center">c</th>', "<p>line<br>break<br>next</p>"),
    ):
        assert expected in html
    assert html.count("<ol") == 1
    assert '<span class="keyword">if</span> x:\n    y' in html


@pytest.mark.parametrize(
    ("tex", "parts"),
    [
        (r"\frac{1}{2} + \sqrt[3]{x}", ["<mfrac><mn>1</mn><mn>2</mn></mfrac>", "<mroot>"]),
        (r"x_i^2 \le \alpha \cdot \mathbb{R}", ["<msubsup>", "≤", "α", "ℝ"]),
        (r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}", ["∑", "<msubsup>"]),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", ["<mtable", "<mtd><mi>d</mi></mtd>"]),
        (r"\left( \int_0^\infty e^{-x}\,dx \right)", ["∫", "∞", 'stretchy="true"']),
        (r"f(x) = \begin{cases} 1 & x > 0 \\ 0 & \text{if not} \end{cases}", ["if\u00a0not"]),
        (r"\hat{y} = \operatorname{softmax}(Wx + b)'", ["<mover>", "softmax", "′"]),
    ],
)
def test_formulas_become_mathml(browser: Browser, open_server: Server, tex: str, parts: list[str]) -> None:
    with looking(browser, open_server, "/dashboard") as page:
        for source in (f"It is ${tex}$.", f"It is \\({tex}\\).", f"$$\n{tex}\n$$", f"\\[ {tex} \\]"):
            html = rendered(page, source)
            assert "<math" in html
            for part in parts[:1]:
                assert part in html.replace("&nbsp;", "\u00a0").replace("<munderover>", "<msubsup>"), source


def test_what_is_no_formula_stays_text(browser: Browser, open_server: Server) -> None:
    with looking(browser, open_server, "/dashboard") as page:
        assert rendered(page, "It costs $5 and $10.") == "<p>It costs $5 and $10.</p>"
        assert rendered(page, r"$\unheard{x}$") == r'<p><code class="tex">$\unheard{x}$</code></p>'
        # Names that every object has, and a command without what it takes.
        begun = [rf"\begin{{{name}}}a\end{{{name}}}" for name in ("valueOf", "__proto__")]
        for tex in (r"\constructor", r"\toString", *begun, r"\not\hline"):
            assert rendered(page, f"**bold** ${tex}$").startswith("<p><strong>bold</strong> <code")
        assert "<math" not in rendered(page, "$$" + "&" * 200_000 + "$$")
        deep = rendered(page, "$" + r"\sqrt{" * 300 + "$")
        assert "<math" not in deep


def test_a_megabyte_of_hostile_text_takes_time_in_proportion_to_its_length(
    browser: Browser, open_server: Server
) -> None:
    """Sixteen times the text takes at most forty times the time: 256 times would be its square."""
    runs = " ".join("`" * length + "a" for length in range(1, 90))
    kinds = [
        *("[", "![a](", "*a ", "*a _b **c __d ~~e [f ", "**a [", "***a _b ", ">", "- ", "`", runs, "`a|", "$a ", "$$"),
        *("\\(", "~", "](a ", "_", "- a\n", "\\[\n", "~~~ a `\n", "|a|\n", "$$ a\n", "1) a\n"),
        *("```yaml\n", "```toml\n", "```c\n'", "```html\n<!--"),  # what begins code comes once
    ]
    with looking(browser, open_server, "/dashboard") as page:
        took = page.evaluate(
            """async (kinds) => {
                const { markdown } = await import("/dashboard/files/markdown.js");
                const seconds = (text) => {
                    const began = performance.now();
                    markdown(text);
                    return performance.now() - began;
                };
                const lengths = [2 ** 16, 2 ** 20];
                return kinds.map((kind) => {
                    const [, head, rest] = /^(```\\w+)?([^]*)$/.exec(kind);
                    const most = head ? 190_000 : Infinity; // of longer code nothing is coloured
                    const text = (length) => (head ?? "") + rest.repeat(Math.min(length, most) / rest.length);
                    return lengths.map((length) => seconds(text(length)));
                });
            }""",
            kinds,
        )
    for kind, (little, much) in zip(kinds, took, strict=True):
        assert much < 40 * max(little, 100), (kind[:20], little, much)
