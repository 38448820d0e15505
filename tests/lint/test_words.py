"""The check of words finds what it names, and nothing in plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from lint.budgets import report_excess
from lint.words import findings


def kinds(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "module.py"
    path.write_text(source)
    return [finding.kind for finding in findings(path)]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ('"""Of one engine, the blocks that are free."""\n', "opener"),
        ('def free() -> None:\n    """Whether a block is free."""\n', "opener"),
        ('"""The free blocks."""\n', "short"),
        ("# The engine tells its client\n", "tell"),
        ("x = 1  # nobody waits for it\n", "nobody"),
        ('"""Return the block that a request, meanwhile preempted, owned."""\n', "beside"),
        ('"""Return all blocks but\nfor the first one."""\n', "beside"),
        ('SIZE = 8\n"""Whether blocks are that large."""\n', "opener"),
        ('class Block:\n    size: int\n    """The bytes that it tells."""\n', "tell"),
    ],
)
def test_each_kind_is_found(tmp_path: Path, source: str, kind: str) -> None:
    assert kinds(tmp_path, source) == [kind]


def test_plain_text_and_code_have_no_findings(tmp_path: Path) -> None:
    source = '"""Free the blocks of a preempted request."""\n\ntell = "nobody"  # the name of a variable\n'
    assert kinds(tmp_path, source) == []


def test_comments_of_native_sources_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pool.h"
    path.write_text('int who;  // whoever waits\nauto url = "http://who";\n// The pool tells its threads.\n')
    assert [(finding.line, finding.text) for finding in findings(path)] == [(1, "whoever"), (3, "tells")]


def test_a_finding_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Free the blocks of a request.\n\nThe pool tells how many there are.\n"""\n')
    assert [(finding.line, finding.text) for finding in findings(path)] == [(3, "tells")]


def test_only_values_above_their_bound_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_excess([("lines of app", 5, 5)]) == 0
    assert report_excess([("lines of app", 5, 5), ("lines of gpu", 6, 5)]) == 1
    assert capsys.readouterr().out.startswith("lines of gpu: 6, at most 5")
