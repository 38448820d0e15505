"""A package's docstring lists its modules, in the order in which to read them; none is missing and none is made up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = sorted(
    path.parent for room in ("app", "engine", "gpu", "protocol") for path in (REPOSITORY / room).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_package_lists_its_modules(package: Path) -> None:
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = re.findall(r"^(\w+)  +\S", docstring, re.MULTILINE)
    assert sorted(listed) == sorted(modules)
