"""Check the sizes of packages and files, and that no files import each other in a circle.

The line ledger: a commit that needs more lines raises the bound in `lint/budgets.toml` and says why in its message.
Run it as `python -m lint.rooms`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

from lint.budgets import PACKAGES, budgets, report_excess


def frame_lines(source: str) -> int:
    """Return the number of lines that a module's docstring and top-level imports take."""
    tree = ast.parse(source)
    nodes: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    nodes += [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    if ast.get_docstring(tree) is not None:
        nodes.append(tree.body[0])
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of more than one module (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for imported in imports[module]:
            if imported not in numbers:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], numbers[imported])
        if lowest[module] == numbers[module]:
            start = stack.index(module)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in imports:
        if module not in numbers:
            visit(module)
    yield from found


def repeated_classes(package: str) -> Iterator[tuple[str, int]]:
    """Yield the class names that several files of a package define, with the number of definitions."""
    trees = (ast.parse(file.read_text()) for file in Path(package).rglob("*.py"))
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return ((name, count) for name, count in sorted(names.items()) if count > 1)


def main() -> int:
    """Print the ledger. Returns 1 if a bound is exceeded or a circle exists."""
    allowed = budgets()
    measured: list[tuple[str, int, int]] = []
    print(f"{'':18}{'lines':>8}{'files':>8}{'frame':>8}{'longest':>9}")
    total = Counter[str]()
    for package in PACKAGES:
        sources = {file: file.read_text() for file in Path(package).rglob("*.py")}
        lines = {file: source.count("\n") for file, source in sources.items()}
        frame = sum(frame_lines(source) for source in sources.values())
        total.update(lines=sum(lines.values()), files=len(lines), frame=frame)
        print(f"{package:18}{sum(lines.values()):8}{len(lines):8}{frame:8}{max(lines.values()):9}")
        measured.append((f"lines of {package}", sum(lines.values()), allowed["lines"][package]))
        measured += [(f"lines of {file}", count, allowed["most_lines_per_file"]) for file, count in lines.items()]
        repeated = list(repeated_classes(package))
        measured.append((f"class names used twice in {package}", len(repeated), allowed["repeated_classes"][package]))
    print(f"{'all':18}{total['lines']:8}{total['files']:8}{total['frame'] / total['lines']:8.1%}")
    measured.append(("files", total["files"], allowed["files"]))
    measured.append(("lines of frame, in percent", round(100 * total["frame"] / total["lines"]), allowed["frame"]))
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    found = list(circles({module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}))
    for circle in found:
        print("import circle: " + ", ".join(circle))
    return report_excess([*measured, ("import circles", len(found), 0)])


if __name__ == "__main__":
    sys.exit(main())
