"""The errors and warnings before a model is loaded, if a card lacks what it needs. The tests need no card."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.errors import ConfigError, HeadraceError
from gpu.cuda_host import check_compiler, ensure_kernel_cache, why_no_device
from gpu.kv_cache import GIB
from gpu.model_loader import _warn_once, resolve_device
from gpu.models.communicators import TorchCommunicator
from gpu.parallel.links import RingWriter
from gpu.parallel.messages import Group, RankSetup
from gpu.parallel.multiproc import Shared, _setup
from gpu.parallel.rank_main import serve
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from gpu.worker import Worker
from tests.gpu.test_executor import CONFIG
from tests.support.embedded_model import embedded_gguf

VERSION = "NVRM version: NVIDIA UNIX {kind}  {number}  Sat Sep  7 04:28:14 UTC 2025\nGCC version: gcc version 12.2.0\n"
KINDS = ["x86_64 Kernel Module", "Open Kernel Module for x86_64"]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two cards that the driver lists and this torch can use, as far as it says."""
    _warn_once.cache_clear()
    monkeypatch.setattr("gpu.model_loader._has_cuda_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_that_is_too_old_is_named_with_what_works(tmp_path: Path, kind: str) -> None:
    def said(number: str, cuda: str | None) -> str:
        file = tmp_path / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(VERSION.format(kind=kind, number=number))
        return ". ".join(why_no_device("2.13.0", cuda, tmp_path))

    old = said("535.104.05", "13.0")
    assert "driver is 535.104.05, and torch 2.13.0 is built for CUDA 13.0, which needs driver 580 or newer" in old
    assert "pip install --force-reinstall torch==2.13.0 --index-url" in old
    assert "cu126" in old
    assert "cu126" not in said("470.57", "13.0")  # for which there is no build
    assert "dmesg" in said("580.65.06", "13.0")
    assert "built without CUDA" in said("580.65.06", None)
    assert "of an unknown version" in why_no_device("2.13.0", "13.0", tmp_path / "nothing")[0]


def test_a_card_that_cannot_be_used_is_refused_by_name_and_auto_warns_once(
    cards: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cards.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"device is {name}: the NVIDIA driver .* CUDA 13\.0.*device=cpu works"):
            resolve_device(name)
    with caplog.at_level(logging.WARNING):
        assert [resolve_device("auto") for _ in range(3)] == ["cpu"] * 3
    assert len(caplog.records) == 1
    assert "CPU is used: the NVIDIA driver is" in caplog.text


def test_a_cuda_device_always_has_a_number(cards: pytest.MonkeyPatch) -> None:
    assert [resolve_device(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]


class Reached(Exception):
    """The test ends here."""


def noting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the device that is set; every call that would need a card raises `Reached`."""
    notes: list[str] = []

    def ask(device: torch.device) -> tuple[int, int]:
        notes.append("memory")
        raise Reached

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: notes.append(str(device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    return notes


def test_a_worker_makes_its_device_the_current_one_before_anything_else(cards: pytest.MonkeyPatch) -> None:
    notes = noting(cards)
    with pytest.raises(Reached):
        Worker(CONFIG, iter([]), WorkerOptions(device="cuda:1"))
    assert notes == ["cuda:1", "memory"]


def test_a_rank_makes_its_device_the_current_one_before_it_meets_others(cards: pytest.MonkeyPatch) -> None:
    notes = noting(cards)
    layout = Layout(tensor_parallel_size=2, rank=1)
    setup = RankSetup(
        layout=layout,
        model=str(embedded_gguf()),
        cache_dir=None,
        load_format="auto",
        options={"device": "cuda:1"},
        ring=Group(0, ()),  # type: ignore[arg-type]
    )

    def join(*_: object) -> None:
        notes.append("join")
        raise Reached

    with pytest.raises(Reached):
        serve(setup, None, None, lambda message: None, join, None)  # type: ignore[arg-type]
    assert notes == ["cuda:1", "join"]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_tensor_ranks_meet_on_a_device_with_a_number(cards: pytest.MonkeyPatch, device: str) -> None:
    found: list[torch.device] = []
    cards.setattr(dist, "init_process_group", lambda **options: found.append(options["device_id"]))
    TorchCommunicator(
        dist.HashStore(),  # type: ignore[attr-defined]
        Layout(tensor_parallel_size=2),
        resolve_device(device),
    )
    assert found[0].index == int(device == "cuda:1")  # torch raises for None


def test_ranks_on_cards_share_the_cores(cards: pytest.MonkeyPatch) -> None:
    cards.setattr("gpu.parallel.multiproc.usable_cores", lambda: 9)
    layout, ring = Layout(tensor_parallel_size=2), RingWriter(2)
    with closing(ring), Shared(layout, 4096) as shared:
        setup = _setup({"model": "m", "cache_dir": None, "load_format": "auto"}, WorkerOptions(), layout, shared, ring)
    assert setup.options["num_threads"] == 4


def test_weights_are_counted_in_the_type_that_a_card_keeps_them_in(cards: pytest.MonkeyPatch) -> None:
    noting(cards)
    free = 40_000  # 28,000 weights in 4 bits, but not in 16
    cards.setattr(torch.cuda, "mem_get_info", lambda device: (free, GIB))
    with pytest.raises(HeadraceError, match=r"weights, which take at least .*KiB; 39\.1 KiB are free"):
        Worker(CONFIG, iter([]), WorkerOptions(device="cuda", dtype="bfloat16", max_model_len=64))


# --- compiler and cache


def test_a_compiler_that_is_missing_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(headers))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"does not find Python\.h\. .*apt install gcc libc6-dev python3-dev"):
        check_compiler()
    (headers / "Python.h").touch()
    check_compiler()
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"CC\) cannot be started"):
        check_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="neither gcc nor clang is on the PATH"):
        check_compiler()


def test_kernels_go_to_a_private_folder_where_theirs_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writable, file = tmp_path / "a" / "b", tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(writable))
    ensure_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(writable)
    for name, value in (("TRITON_CACHE_DIR", file / "below"), ("TRITON_HOME", file), ("HOME", file)):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        monkeypatch.setenv(name, str(value))  # below a file there is no folder, for root neither
        ensure_kernel_cache()
        private = Path(os.environ["TRITON_CACHE_DIR"])
        assert private.stat().st_mode & 0o777 == 0o700
        assert "every start compiles the kernels anew" in caplog.text
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "below"))
    monkeypatch.setattr("tempfile.mkdtemp", _no_room)
    with pytest.raises(ConfigError, match=r"TRITON_CACHE_DIR is .*--tmpfs /tmp"):
        ensure_kernel_cache()


def _no_room(prefix: str) -> str:
    raise OSError(28, "No space left on device")
