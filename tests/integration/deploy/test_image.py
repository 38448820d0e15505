"""The image, built and run. Minutes: part of `make storm`; what can be known sooner is in test_dockerfile.py."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.cpu.builds import BUILDS
from tests.integration.deploy.image import Container, Image

pytestmark = [pytest.mark.storm, pytest.mark.timeout(2400)]

MAX_SIZE = 10**9  # bytes, unpacked
BODY = {"messages": [{"role": "user", "content": "Count to a hundred."}], "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    missing = [name for name in ("buildah", "mmdebstrap", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"it takes root, and {missing or 'nothing else'}")
    folder = tmp_path_factory.mktemp("image")
    built = Image(folder)
    yield built
    built.close()
    shutil.rmtree(folder, ignore_errors=True)


def stream(container: Container, **fields: object) -> Iterator[str]:
    """The events of a chat completion, as they come."""
    with container.client.stream("POST", "/v1/chat/completions", json=BODY | fields) as answer:
        assert answer.status_code == 200
        yield from (line for line in answer.iter_lines() if line.startswith("data: "))


def test_it_is_small_and_has_every_build_of_the_library_and_no_torch(image: Image) -> None:
    (packages,) = image.root.glob("opt/headrace/lib/python3*/site-packages")
    here = {name for name, build in BUILDS.items() if build.machine == platform.machine()}
    assert {path.name.partition(".")[0] for path in (packages / "gpu/cpu").glob("*.so")} == here
    assert not list(packages.glob("torch*"))
    assert not list(packages.glob("pip*"))
    size = int(subprocess.check_output(["du", "-sxb", str(image.root)], text=True).split()[0])
    print(f"\nThe image has {size / 1e6:.0f} MB")
    assert size < MAX_SIZE


def test_it_serves_as_nobody_on_a_root_that_cannot_be_written_and_drains(image: Image) -> None:
    started = time.monotonic()
    with Container(image) as container:
        container.wait_ready()
        ready = time.monotonic() - started
        events = stream(container, max_tokens=100)
        first = [next(events) for _ in range(2)][1]  # behind the role
        print(f"\nIt is ready after {ready:.1f} s, and the first token comes after {time.monotonic() - started:.1f} s")
        assert '"content":"' in first
        assert container.status("NSpid")[-1] == "1"
        assert set(container.status("Uid")) == {image.config["User"].partition(":")[0]}
        assert int(container.status("CapEff")[0], 16) == 0
        assert container.execute("touch", "/opt/headrace/x").returncode != 0
        assert "Read-only" in container.execute("touch", "/var/cache/headrace/x").stderr
        _, *health = image.config["Healthcheck"]["Test"]
        assert container.execute(*health).returncode == 0
        container.signal()
        rest = list(events)
        assert rest[-1] == "data: [DONE]", "a request in flight is drained"
        assert container.wait_exit() == 0


def test_its_own_processes_are_reaped(image: Image) -> None:
    with Container(image, engine="process") as container:
        container.wait_ready()
        assert list(stream(container, max_tokens=2))[-1] == "data: [DONE]"
        states = "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1"
        found = container.execute("sh", "-c", states).stdout.split()
        assert len(found) > 2, "the server, its engine, and who looks"
        assert "Z" not in found
        assert container.stop() == 0


def test_without_its_model_it_serves_one_that_is_mounted(image: Image, tmp_path: Path) -> None:
    (model,) = (image.root / "var/cache/headrace").glob("*.gguf")
    shutil.copy(model, tmp_path / "mounted.gguf")
    tmp_path.chmod(0o755)
    with Container(image, model="/mnt/mounted.gguf", volumes={"/mnt": tmp_path, "/var/cache": None}) as container:
        container.wait_ready()
        assert container.client.get("/v1/models").json()["data"][0]["id"] == "mounted"
        assert list(stream(container, max_tokens=2))[-1] == "data: [DONE]"
