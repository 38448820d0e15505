"""Check the English of docstrings and comments, and print the table of words to watch.

`lint/budgets.toml` bounds the counts of each package; lower a bound when its package does better.
`python -m lint.words` prints the table, and with paths every finding in them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lint.budgets import PACKAGES, budgets, report_excess

# A docstring begins with a verb in the imperative or with a noun phrase that defines the thing, not with these.
OPENERS = re.compile(
    r"(and|as|at|because|but|by|for|from|how|if|in|it|no|none|not|nothing|of|on|only|or|so|that|those|to|until|what"
    r"|whatever|when|where|whether|which|while|who|whoever|whose|why|with)\b",
    re.IGNORECASE,
)
WORDS = {
    "tell": r"tell|tells|told|telling",
    "nobody": r"nobody|somebody|anybody|whoever|whose|whom",
    "who": r"who",
    "beside": r"beside|but\s+for|meanwhile|in\s+the\s+place\s+of",
}
_NATIVE_COMMENT = re.compile(r'(?:"(?:\\.|[^"\\])*"|(?!//)[^"])*//(.*)')
_PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in WORDS.items()}
SUFFIXES = {".py", ".cpp", ".h"}  # of the files that are read
MIN_WORDS = 4  # of a docstring; a shorter one says no more than the name


class Finding(NamedTuple):
    """One place to rewrite. `kind` is a key of `WORDS`, "opener" or "short"."""

    path: Path
    line: int
    kind: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Yield every finding in a file, docstrings first."""
    for line, text in _docstrings(path):
        words = text.split()
        if OPENERS.match(text):
            yield Finding(path, line, "opener", " ".join(words[:8]))
        if len(words) < MIN_WORDS:
            yield Finding(path, line, "short", text)
        yield from _in_text(path, line, text)
    for line, text in _comments(path):
        yield from _in_text(path, line, text)


def count_words(path: Path) -> int:
    """Return the number of words in the docstrings and comments of a file."""
    return sum(len(text.split()) for part in (_docstrings, _comments) for _, text in part(path))


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text() if path.suffix == ".py" else "")):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(node.body):  # the docstring of a constant or a field
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield after.lineno, cleandoc(text)


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    if path.suffix != ".py":  # C++
        for number, line in enumerate(source.splitlines(), 1):
            if match := _NATIVE_COMMENT.match(line):
                yield number, match[1].lstrip("/ ")
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _in_text(path: Path, line: int, text: str) -> Iterator[Finding]:
    for name, pattern in _PATTERNS.items():
        for match in pattern.finditer(text):
            yield Finding(path, line + text.count("\n", 0, match.start()), name, match[0])


def main(paths: list[str]) -> int:
    """Print the table, or the findings in `paths`. Returns 1 if a package exceeds its bounds."""
    if paths:
        for path in paths:
            for finding in findings(Path(path)):
                print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
        return 0
    kinds = [*WORDS, "opener", "short"]
    print(f"{'per 10,000 words':18}" + "".join(f"{kind:>8}" for kind in kinds))
    counts: dict[str, Counter[str]] = {}
    for package in PACKAGES:
        files = sorted(path for path in Path(package).rglob("*") if path.suffix in SUFFIXES)
        counts[package] = Counter(finding.kind for file in files for finding in findings(file))
        rate = 10_000 / max(1, sum(count_words(file) for file in files))
        print(f"{package:18}" + "".join(f"{counts[package][kind] * rate:8.1f}" for kind in kinds))
    allowed = budgets()["words"]
    return report_excess(
        (f"{package}: {kind}", counts[package][kind], allowed[package][kind]) for package in PACKAGES for kind in kinds
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
