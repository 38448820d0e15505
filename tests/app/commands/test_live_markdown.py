"""What is on the screen at the end is the Markdown, however it came; and little is written twice on the way."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from app.commands.chat import LiveMarkdown

ANSWER = """# Sorting

Two lines
of **one** paragraph with <b>tags</b> and `code`.

1. first

2. second

   with more of it

```python
def f():

    return 1
```

| a | b |
| - | - |
| 1 | 2 |

<div>
a block
</div>

The end, *really*.
"""
ESCAPE = re.compile(r"\x1b\[(\d*)([AKJm])|\x1b\[[\d;]*m")


def screen(written: str) -> list[str]:
    """The lines that a terminal shows, of endless height."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(written):
        if found := ESCAPE.match(written, at):
            at = found.end()
            if found[2] == "A":
                row -= int(found[1])
                assert row >= 0, "above the top"
            elif found[2] == "K":
                lines[row] = lines[row][:column]
            elif found[2] == "J":
                lines[row] = lines[row][:column]
                del lines[row + 1 :]
            continue
        if written[at] == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        else:
            lines[row] = lines[row][:column] + written[at] + lines[row][column + 1 :]
            column += 1
        at += 1
    return [line.rstrip() for line in lines]


def shown(pieces: list[str], monkeypatch: pytest.MonkeyPatch, *, interval: float = 0.0, height: int = 40) -> str:
    monkeypatch.setattr("app.commands.chat._INTERVAL", interval)
    monkeypatch.setattr("app.commands.chat._BUSY", 1e9)
    out = io.StringIO()
    live = LiveMarkdown(Console(file=out, force_terminal=True, width=60, height=height, color_system="standard"))
    for piece in pieces:
        live.feed(piece)
    live.end()
    return out.getvalue()


def pieces_of(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(text)), draw.randrange(len(text) // 2)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_the_screen_is_the_same_however_the_text_came(monkeypatch, seed):
    at_once = screen(shown([ANSWER], monkeypatch))
    assert screen(shown(pieces_of(ANSWER, seed), monkeypatch)) == at_once
    text = "\n".join(at_once)
    assert "Two lines\nof one paragraph with <b>tags</b> and code." in text
    assert "**" not in text
    assert "\n 2 second\n" in text
    assert "<div>" in text
    assert text.rstrip().endswith("The end, really.")


def test_lines_that_stay_as_they_are_are_written_once(monkeypatch):
    words = [f"word{number} " for number in range(400)]
    written = shown(words, monkeypatch)
    assert written.count("word7 ") < 12  # as often as its line has words
    assert len(written) < 12 * len("".join(words))


def test_a_paragraph_higher_than_the_screen_moves_no_further_than_its_top(monkeypatch):
    rows = [f"| {number} | {'x' * (number % 7)} |\n" for number in range(60)]  # each may change the columns' widths
    written = shown(["| n | x |\n| - | - |\n", *rows], monkeypatch, height=10)
    assert max(int(up) for up in re.findall(r"\x1b\[(\d+)A", written)) <= 9


def test_a_quick_stream_is_drawn_seldom(monkeypatch):
    assert shown(list(ANSWER), monkeypatch, interval=60.0).count("Sorting") == 1


@pytest.mark.parametrize(
    "text",
    [
        *("<http://a/%1b]52;c;aGVsbG8=%1b%5c>", "# <http://a/%C2%9B2J>", "| a |\n| - |\n| <http://a/%1b[2J> |"),
        *("<mailto:a%1b@b>", "&#8238;over", "[x](http://a/%1b[2J)", "&#27;[2J"),
    ],
)
def test_a_link_or_an_entity_gives_no_command_to_the_terminal(monkeypatch, text):
    written = re.sub(r"\x1b\[[\d;]*[mAJK]", "", shown([text], monkeypatch))
    assert all(c.isprintable() or c == "\n" for c in written), written
