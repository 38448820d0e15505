"""What is kept of step costs is read back whole, or not at all; nothing about it ever ends a start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from app.config.engine import describe
from app.config.settings import Settings
from app.serving.step_cost_file import FOLDER, MAX_BYTES, MAX_FILES, StepCostFile, difference, latest
from app.simulate.machine import Machine
from engine.costs.table import StepCostTable

ENGINE = Machine(table=StepCostTable.unknown(8, 64))


@pytest.fixture
def table() -> StepCostTable:
    return StepCostTable.unknown(8, 64)


def test_what_was_written_is_read_back(tmp_path: Path, table: StepCostTable) -> None:
    file = StepCostFile(tmp_path / "costs" / "a.json")
    assert file.read() is None
    file.write(table)
    assert file.read() == table
    table.decode.begin(4, 0.1)
    file.write(table)
    assert file.read() == table
    assert [each.name for each in file.path.parent.iterdir()] == ["a.json"], "no part is left"


def costs(seconds: float, size: int = 8) -> str:
    """A table whose steps all cost as much."""
    curve = f'{{"sizes": [1, {size}], "seconds": [{seconds}, {seconds}], "counts": [3, 3]}}'
    return f'{{"decode": {curve}, "prefill": {curve}, "mixed": {curve}}}'


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1, 2]", '{"decode": 3}', "\0" * 100, " " * (MAX_BYTES + 1), costs(1e308), costs(1, 10**400)],
)
def test_a_torn_or_foreign_file_is_told_of_and_replaced(
    tmp_path: Path, table: StepCostTable, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = StepCostFile(tmp_path / "a.json")
    file.write(table)
    file.path.write_text(file.path.read_text()[:-9] if content == "{" else content)
    with caplog.at_level(logging.WARNING):
        assert file.read() is None
    assert "a.json cannot be used and are measured again" in caplog.text
    file.write(table)
    assert file.read() == table


def test_a_pipe_in_its_place_is_replaced_and_not_waited_for(tmp_path: Path, table: StepCostTable) -> None:
    file = StepCostFile(tmp_path / "a.json")
    os.mkfifo(file.path)
    assert file.read() is None
    file.write(table)
    assert file.read() == table


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_a_measurement(
    tmp_path: Path, table: StepCostTable
) -> None:
    (tmp_path / "costs").write_text("not a folder")
    file = StepCostFile(tmp_path / "costs" / "a.json")
    file.write(table)
    assert file.read() is None


def test_of_too_many_files_the_oldest_go(tmp_path: Path, table: StepCostTable) -> None:
    for number in range(MAX_FILES + 5):
        StepCostFile(tmp_path / f"{number}.json").write(table)
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    assert StepCostFile(tmp_path / f"{MAX_FILES + 4}.json").read() == table


def test_the_latest_of_a_model_and_of_the_nearest_settings_is_found(tmp_path: Path, table: StepCostTable) -> None:
    assert latest(Settings(cache_dir=tmp_path, model="a")) is None
    for age, (name, model, seqs) in enumerate((("1", "b", 64), ("2", "a", 8), ("3", "a", 64), ("4", "a", 64))):
        settings = Settings(model=model, max_num_seqs=seqs)
        file = StepCostFile(tmp_path / FOLDER / f"{name}.json", describe(ENGINE, settings))
        file.write(table)
        os.utime(file.path, (1e9 - age, 1e9 - age))
    for torn in ("{", "[]", "{}", '{"models": ["a"]}'):
        (tmp_path / FOLDER / "torn.json").write_text(torn)
        for model, seqs, name in (("b", 64, "1"), ("a", 8, "2"), ("a", 64, "3"), ("b", 8, "1")):
            found = latest(Settings(cache_dir=tmp_path, model=model, max_num_seqs=seqs))
            assert found == tmp_path / FOLDER / f"{name}.json"
    assert latest(Settings(cache_dir=tmp_path, model="c")) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(0.01, 0.029, None), (0.01, 0.05, "5 times as long"), (0.05, 0.01, "5 times as fast"), (0.05, 0.02, None)],
)
def test_a_table_that_differs_much_from_the_one_before_it_is_told_of(
    tmp_path: Path, before: float, after: float, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = StepCostFile(tmp_path / "a.json")
    file.write(StepCostTable.from_json(costs(before).encode()))
    assert difference(file.path) is None
    file.write(StepCostTable.from_json(costs(after).encode()))
    warning = difference(file.path)
    if said is None:
        assert warning is None
        assert not caplog.records
    else:
        assert warning is not None
        assert said in warning
        assert said in caplog.text


def test_a_table_that_no_machine_can_be_so_slow_for_is_neither_kept_nor_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StepCostFile(tmp_path / "a.json", most_seconds=0.3)
    slow = StepCostTable.from_json(costs(0.999).encode())
    file.write(slow)
    assert not file.path.exists()
    StepCostFile(tmp_path / "a.json").write(slow)
    assert file.read() is None
    assert caplog.text.count("1 s for one decode") == 2
