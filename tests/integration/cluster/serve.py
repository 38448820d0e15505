"""The shipped application on Ray Serve, with two local raylets for two machines."""

from __future__ import annotations

import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml

from tests.integration.cluster.cluster import family, name_of
from tests.support.harness import REPOSITORY, Server

SHIPPED = REPOSITORY / "deploy" / "ray" / "serve.yaml"


class ServeOnRay(Server):
    """A Server whose port is that of Serve's proxy. `scaling` replaces what the file says of `autoscaling_config`."""

    def __init__(self, scaling: dict[str, Any], **settings: object) -> None:
        super().__init__("uvloop", **settings)
        self.port = _port_that_ray_does_not_take()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.client.base_url = self.base_url
        self._home = tempfile.TemporaryDirectory(prefix="headrace-serve-")
        self._scaling = scaling
        self._seen: set[int] = set()

    def __enter__(self) -> Self:
        configuration = yaml.safe_load(SHIPPED.read_text())
        configuration |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": self.port}}
        application = configuration["applications"][0]
        application["args"] = {name: str(value) for name, value in self._settings.items()}
        application["deployments"][0]["autoscaling_config"] |= self._scaling
        self._file = Path(self._home.name) / "serve.yaml"
        self._file.write_text(yaml.safe_dump(configuration))
        return super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        processes = self.processes()
        super().__exit__(*exc_info)
        self._home.cleanup()
        left = [name for pid, name in processes.items() if name_of(pid) == name]
        assert not left or exc_info[0] is not None, f"left behind: {left}"

    def command(self) -> list[str]:
        return ["tests.integration.cluster.machines", str(self._file)]

    def processes(self) -> dict[int, str]:
        """All that were started for it, by their ids, with their names."""
        assert self._process is not None
        return family(self._process.pid)

    def replicas(self) -> list[int]:
        """Processes of replicas."""
        return [pid for pid, name in self.processes().items() if name.startswith("ray::ServeReplica")]


def _port_that_ray_does_not_take() -> int:
    """Until Serve's proxy binds it, Ray's other processes look for ports of their own, one of which says 200 to all."""
    for port in random.sample(range(20_000, 32_000), 100):  # beyond its workers' and below the system's
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
