"""The check of rooms finds circles and counts a module's frame."""

from __future__ import annotations

from lint.rooms import circles, frame_lines


def test_circles_are_found_once_and_chains_are_not() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"f"}, "f": {"e"}, "g": set[str]()}
    assert sorted(circles(imports)) == [["a", "b", "c"], ["e", "f"]]
    assert list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})) == []


def test_the_frame_is_the_docstring_and_the_imports() -> None:
    source = '"""A module.\n\nTwo paragraphs.\n"""\n\nimport os\nfrom typing import (\n    Any,\n)\n\nx: Any = os\n'
    assert frame_lines(source) == 4 + 1 + 3
