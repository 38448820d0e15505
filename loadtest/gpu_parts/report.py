"""The report of a run: rows of figures, notes on omissions, failed checks; as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

_TIMES = ("us", "ms", "s")


@dataclass(frozen=True)
class Row:
    """One figure, and what it is held to in the same unit: the roofline, which is the best that the measured card could
    do; for served workloads and other libraries, the engine's offline figure of this run."""

    part: str
    name: str
    value: float
    unit: str
    reference: float | None = None

    @property
    def share(self) -> float | None:
        """Return the ratio of the value to the reference."""
        if not self.reference or not self.value:
            return None
        return self.reference / self.value if self.unit in _TIMES else self.value / self.reference


@dataclass
class Report:
    """Grows as the parts of a benchmark run."""

    machine: dict[str, object] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    engines: dict[str, object] = field(default_factory=dict)  # by model, as `headrace simulate --table` reads it

    def add(self, part: str, name: str, value: float, unit: str, reference: float | None = None) -> None:
        row = Row(part, name, value, unit, reference)
        self.rows.append(row)
        print(_line(row), flush=True)

    def note(self, text: str) -> None:
        """Something that was not measured, and why."""
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def fail(self, text: str) -> None:
        """Something that is wrong."""
        self.failures.append(text)
        print(f"FAILED: {text}", flush=True)

    def value(self, part: str, name: str) -> float | None:
        """A figure of this run, None if it was not measured."""
        return next((row.value for row in self.rows if (row.part, row.name) == (part, name)), None)

    def write(self, path: Path) -> None:
        """Everything, with the shares worked out."""
        rows = [asdict(row) | {"share": row.share} for row in self.rows]
        whole = {"machine": self.machine, "rows": rows, "notes": self.notes, "failures": self.failures}
        path.write_text(json.dumps(whole, indent=1) + "\n")

    def table(self) -> str:
        """The figures for people, as docs/benchmarks.md keeps them."""
        lines = ["| part | what | value | unit | held to | share |", "| --- | --- | ---: | --- | ---: | ---: |"]
        for row in self.rows:
            reference = "" if row.reference is None else _number(row.reference)
            share = "" if row.share is None else f"{row.share:.0%}"
            lines.append(f"| {row.part} | {row.name} | {_number(row.value)} | {row.unit} | {reference} | {share} |")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAILED: {failure}" for failure in self.failures]
        return "\n".join(lines)


def _line(row: Row) -> str:
    share = "" if row.share is None else f" ({row.share:.0%} of {_number(row.reference or 0)})"
    return f"{row.part}: {row.name}: {_number(row.value)} {row.unit}{share}"


def _number(value: float) -> str:
    """Three significant digits, without exponents where people would not write them."""
    if value == 0 or abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    digits = max(0, 2 - len(str(int(abs(value)))) + 1) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"
