"""While a module is imported the collector is off, and what it has made is left alone; otherwise nothing changes."""

import gc
import os

import pytest

from app import NEW_OBJECTS, prepare_process
from app.runtime import frozen_imports


@pytest.fixture(autouse=True)
def _thaw():
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_nothing_is_collected_during_the_import_and_nothing_looked_at_afterwards() -> None:
    before = gc.get_freeze_count()
    with frozen_imports("a.module.that.is.new"):
        assert not gc.isenabled()
        made: list[list[object]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
    assert not any(candidate is made for candidate in gc.get_objects())


def test_a_module_that_is_there_makes_no_difference() -> None:
    before = gc.get_freeze_count()
    with frozen_imports("gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before


def test_a_collector_that_was_off_stays_off_and_a_failure_turns_it_on_again() -> None:
    gc.disable()
    try:
        with frozen_imports("a.module.that.is.new"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ImportError), frozen_imports("a.module.that.is.new"):
        raise ImportError
    assert gc.isenabled()


def test_while_requests_come_and_go_the_collector_seldom_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OPENBLAS_THREAD_TIMEOUT": "20"})
    prepare_process()
    assert os.environ == {"OPENBLAS_THREAD_TIMEOUT": "20", "PYDANTIC_DISABLE_PLUGINS": "__all__"}, "not what was set"
    gc.collect()
    made: list[list[object]] = [[] for _ in range(NEW_OBJECTS // 2)]
    assert gc.get_count()[0] >= len(made)
