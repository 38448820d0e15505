"""Writes the tables of cli.md beside this file, from the commands and `Settings`. Run it after a change of a flag or a
setting; a test compares.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.commands.cli import COMMANDS, GROUPS, MOST_USED, SHORT_FLAGS, Command, CommandGroup
from app.config.settings import Settings
from app.config.sources import allowed_values, flag_name, shown

BEGIN, END = "<!-- written by cli_tables.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """The settings by groups, and the flags of every command."""
    parts = ["## Settings\n\nBold: those that most servers need.\n"]
    rows: list[str] = []
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            parts.append("".join(rows))
            head = "| flag | default | allowed | |\n| --- | --- | --- | --- |\n"
            rows = [f"### {GROUPS[name][0].upper()}{GROUPS[name][1:]}\n\n{head}"]
        flags = ", ".join(f"`{flag}`" for flag in (flag_name(name), *SHORT_FLAGS.get(name, ())))
        flags = f"**{flags}**" if name in MOST_USED else flags
        default = "" if field.default in (None, ()) or field.default == {} else shown(field.default)
        rows.append(f"| {flags} | {_cell(default)} | {_cell(allowed_values(field))} | {_cell(field.description)} |\n")
    parts.append("".join(rows))
    parts += _commands(COMMANDS, "headrace")
    return "\n".join(part for part in parts if part)


def _commands(commands: Mapping[str, Command | CommandGroup], prefix: str) -> Iterator[str]:
    for name, entry in commands.items():
        if isinstance(entry, CommandGroup):
            yield from _commands(entry.commands, f"{prefix} {name}")
            continue
        parser = argparse.ArgumentParser(prog=f"{prefix} {name}", add_help=False)
        entry.add_flags(parser)
        takes = " It takes settings." if entry.takes_settings else ""
        rows = "".join(f"| {_flags(each)} | {_cell(_help(parser, each))} |\n" for each in parser._actions)
        rows = f"\n| flag | |\n| --- | --- |\n{rows}" if rows else ""
        yield f"## {prefix} {name}\n\n{entry.summary}{takes}\n{rows}"


def _flags(action: argparse.Action) -> str:
    value = f" {action.metavar}" if action.metavar and action.option_strings else ""
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings or [str(action.metavar or action.dest)])


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{text} One of {', '.join(map(str, action.choices))}." if action.choices else text


def _cell(value: Any) -> str:
    return re.sub(r"([|<>*_])", r"\\\1", " ".join(str(value or "").split()))


def written(page: str) -> str:
    """The page with the tables as they are now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{tables()}{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    path = Path(__file__).with_name("cli.md")
    path.write_text(written(path.read_text()))
