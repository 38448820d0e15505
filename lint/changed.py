"""`python -m lint.changed [BASE]`: print the test files to run for what differs from BASE (a git revision; main).

A test file is printed if it changed, if it imports a changed module, or if its path mirrors the changed module's
(`app/http/scope.py`: `tests/app/http/test_scope*.py`). Importers of importers are left out: `make test` has them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp

from lint.budgets import PACKAGES


def changed_files(base: str) -> list[str]:
    """Return the paths that differ between `base` and the working tree, untracked files included."""
    commands = ["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"]
    return [
        path
        for command in commands
        for path in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    ]


def tests_of(paths: list[str]) -> set[str]:
    """Return the test files that changed, that import a changed module, or that mirror a changed module's path."""
    graph = grimp.build_graph(*PACKAGES, "loadtest", "lint", "tests", cache_dir=None)
    tests = set()
    for path in map(Path, paths):
        if path.suffix != ".py":
            continue
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        importers = graph.find_modules_that_directly_import(module) if module in graph.modules else set()
        names = {path.as_posix(), *(importer.replace(".", "/") + ".py" for importer in importers)}
        mirrored = Path("tests", path.parent).glob(f"test_{path.stem}*.py")
        tests |= names | {found.as_posix() for found in mirrored}
    return {name for name in tests if Path(name).name.startswith("test_") and Path(name).is_file()}


if __name__ == "__main__":
    print("\n".join(sorted(tests_of(changed_files(*sys.argv[1:] or ["main"])))))
