"""`headrace pull` with a hub of this machine: killed, twice at once, and ended by a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.support.fake_hub import FakeHub

MODEL = "org/tiny-GGUF:q8_0"
TIMEOUT = 120  # seconds


@pytest.fixture
def hub(tmp_path):
    path = TinyGGUF(tmp_path / "t.gguf").add_weights(random_weights(TINY), "Q8_0").add_tokenizer().save()
    with FakeHub({"org/tiny-GGUF": {"tiny-Q8_0.gguf": path.read_bytes()}}, pause=0.05, chunk=20_000) as served:
        yield served


def start(hub: FakeHub, home: Path, *command: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "HF_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "app.commands.cli", *command],
        env=environment | hub.environment(home) | {"HEADRACE_CACHE_DIR": str(home / "headrace")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    return out + err


def wait_for_part(home: Path, least: int) -> int:
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        sizes = [path.stat().st_size for path in home.glob("hub/*/blobs/*.headrace.incomplete")]
        if sizes and sizes[0] >= least:
            return sizes[0]
        time.sleep(0.02)
    raise AssertionError("nothing was downloaded")


def begins(hub: FakeHub) -> list[int]:
    return [int(each.range.removeprefix("bytes=").split("-")[0]) for each in hub.transfers() if each.range]


def test_a_killed_download_goes_on_where_it_was(hub, tmp_path):
    first = start(hub, tmp_path, "pull", MODEL)
    wait_for_part(tmp_path, 200_000)
    first.kill()
    first.communicate()
    kept = wait_for_part(tmp_path, 200_000)
    assert "org/tiny-GGUF" in (listed := finished(start(hub, tmp_path, "list")))
    assert "partly fetched" in listed
    hub.pause = 0.0
    assert f"{MODEL[:-4]}Q8_0 is complete." in finished(start(hub, tmp_path, "pull", "--model", MODEL))
    assert begins(hub) == [0, kept]
    listed = finished(start(hub, tmp_path, "list"))
    assert listed.split()[0] == f"{MODEL[:-4]}Q8_0"
    assert listed.split()[3] == "complete"
    (blob,) = (tmp_path / "hub").glob("*/blobs/*")
    assert blob.read_bytes() == hub.repositories["org/tiny-GGUF"]["tiny-Q8_0.gguf"]


def waiting(hub: FakeHub, home: Path) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Return a process that downloads, slowly, and one that waits for it."""
    hub.pause = 1.0
    first = start(hub, home, "pull", MODEL)
    wait_for_part(home, 20_000)
    second = start(hub, home, "pull", MODEL)
    assert second.stderr is not None
    while "Waiting for another process" not in (line := second.stderr.readline()):
        assert line, "the second did not wait"
    return first, second


def test_of_two_processes_one_downloads_and_the_other_waits(hub, tmp_path):
    both = waiting(hub, tmp_path)
    hub.pause = 0.0
    assert all("is complete" in finished(each) for each in both)
    assert begins(hub) == [0]


def test_a_process_that_waits_takes_over_when_the_other_is_killed(hub, tmp_path):
    first, second = waiting(hub, tmp_path)
    first.kill()
    first.communicate()
    hub.pause = 0.0
    assert "is complete" in finished(second)
    assert len(begins(hub)) == 2
    assert begins(hub)[1] >= 20_000


@pytest.mark.parametrize(("command", "number", "code"), [("pull", signal.SIGINT, 130), ("serve", signal.SIGTERM, 0)])
def test_a_signal_ends_a_download(hub, tmp_path, command, number, code):
    hub.pause = 1.0
    options = ["--port", "0"] if command == "serve" else []
    process = start(hub, tmp_path, command, MODEL, *options)
    wait_for_part(tmp_path, 40_000)
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == code
    assert sum(path.stat().st_size for path in tmp_path.glob("hub/*/blobs/*")) < 1_000_000, (
        "it fetched all before it ended"
    )


def test_a_model_can_be_served_by_its_file(hub, tmp_path):
    hub.pause = 0.0
    done = finished(start(hub, tmp_path, "pull", "org/tiny-GGUF", "--gguf-file", "tiny-Q8_0.gguf"))
    assert "org/tiny-GGUF:Q8_0 is complete." in done
    wrong = start(hub, tmp_path, "pull", MODEL, "--gguf-file", "tiny-Q8_0.gguf")
    _, err = wrong.communicate(timeout=TIMEOUT)
    assert wrong.returncode == 1
    assert "names a quantization already" in err
