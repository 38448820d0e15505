"""Builds deploy/Dockerfile without a registry or an engine, and runs what comes out as a container runtime would.

Debian's buildah builds the very file, on a base that mmdebstrap makes as Debian's own slim image is made. To run it,
util-linux makes what matters here: a process id 1, a root that nobody can write to, /tmp in memory, and the user and
environment that the image names. It needs root, and shares the machine's network.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.integration.deploy.dockerfile import DEPLOY
from tests.support.harness import REPOSITORY, TIMEOUT, Server

BASE = "localhost/base"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # this machine's, which may know a proxy's


class Image:
    """What a Dockerfile makes: `root`, a directory with its files, and `config`, what it says of running them."""

    def __init__(self, folder: Path) -> None:
        """Build it; takes minutes."""
        self._folder = folder
        base = folder / "base.tar"
        slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
        _run("mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates", *slim, "bookworm", str(base))
        container = self._buildah("from", "scratch")
        self._buildah("add", container, str(base), "/")
        self._buildah("add", container, CERTIFICATES, CERTIFICATES)
        self._buildah("commit", "--quiet", container, BASE)
        self._buildah(
            "build", "--isolation", "chroot", "--format", "docker", "--build-arg", f"BASE={BASE}", "--tag", "headrace",
            "--file", str(DEPLOY / "Dockerfile"), str(REPOSITORY),
        )  # fmt: skip
        described = json.loads(self._buildah("inspect", "--type", "image", "headrace"))
        self.config: dict[str, Any] = described["Docker"]["config"]
        self.root = Path(self._buildah("mount", self._buildah("from", "--pull-never", "headrace")))

    def close(self) -> None:
        self._buildah("rm", "--all")

    def _buildah(self, *arguments: str) -> str:
        """What it prints. Its plainest storage works wherever root does."""
        storage = (
            "--storage-driver",
            "vfs",
            "--root",
            str(self._folder / "root"),
            "--runroot",
            str(self._folder / "run"),
        )
        return _run("buildah", *storage, *arguments)


class Container(Server):
    """An image that runs. Keyword arguments are settings, and come beside what the image sets.

    `volumes`: directories inside, and what of this machine is mounted there; None: an empty one in memory.
    """

    def __init__(self, image: Image, *, volumes: Mapping[str, Path | None] | None = None, **settings: object) -> None:
        super().__init__()
        self._image = image
        self._volumes: dict[str, Path | None] = {"/tmp": None, **(volumes or {})}
        given = {"host": "127.0.0.1", "port": self.port} | settings
        self.environment = dict(entry.split("=", 1) for entry in image.config["Env"])
        self.environment |= {f"HEADRACE_{name.upper()}": str(value) for name, value in given.items()}

    def __enter__(self) -> Self:
        config, root = self._image.config, str(self._image.root)
        steps = [
            ["mount", "--bind", root, root],
            ["mount", "-o", "remount,bind,ro", root],
            ["mount", "-t", "proc", "proc", f"{root}/proc"],
            ["mount", "--rbind", "/dev", f"{root}/dev"],
        ]
        for target, source in self._volumes.items():
            what = ["-t", "tmpfs", "tmpfs"] if source is None else ["--bind", str(source)]
            steps.append(["mount", *what, root + target])
        steps.append(["exec", "chroot", f"--userspec={config['User']}", root, *config["Entrypoint"], *config["Cmd"]])
        script = "\n".join(map(shlex.join, steps))
        self._process = subprocess.Popen(
            ["/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", script],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)
            self.wait_exit()
        super().__exit__(*exc_info)

    def stop(self) -> int:
        self.signal()
        return self.wait_exit()

    def signal(self) -> None:
        """SIGTERM to process 1."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGTERM)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        """What its process 1 is on this machine; None if there is none any more."""
        assert self._process is not None
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        except FileNotFoundError:
            return None
        return int(children[0]) if children else None

    def status(self, field: str) -> list[str]:
        """A line of process 1's status: `status("Uid")`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return line.split()[1:]
        raise KeyError(field)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run something inside, as `docker exec` does."""
        user, _, group = self._image.config["User"].partition(":")
        enter = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--root",
            "--setuid",
            user,
            "--setgid",
            group,
        ]
        return subprocess.run(
            [*enter, *command], env=self.environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} has failed\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()
