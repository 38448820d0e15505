"""nginx as people put it before a server: HTTP/1.1 and a pool of idle connections behind it, all else at its defaults.

The package is Debian's; `make test-integration` installs it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support.harness import REPOSITORY, TIMEOUT
from tests.support.raw_client import RawClient

POOL = 4  # idle connections that nginx keeps to the server
IMPATIENT_TIMEOUT = 2  # seconds

_CONFIGURATION = """
daemon off;
master_process off;
pid {home}/pid;
error_log {home}/error.log;
events {{}}
http {{
    access_log {home}/access.log;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    client_max_body_size 16m;
    upstream headrace {{
        server 127.0.0.1:{upstream_port};
        keepalive {pool};
        keepalive_requests 1000000;
    }}
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_next_upstream off;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://headrace; }}
    }}
    server {{
        listen 127.0.0.1:{impatient_port};
        proxy_read_timeout {impatient_timeout};
        location / {{ proxy_pass http://headrace; }}
    }}
}}
"""


class Nginx:
    """An nginx before a server; a context manager.

    `port` is patient; `impatient_port` gives up on an answer that is silent for IMPATIENT_TIMEOUT. A connection that
    the server resets is an error 502 and never tried again.
    """

    def __init__(self, upstream_port: int) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="headrace-nginx-")
        self._upstream_port = upstream_port
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            self.port: int = first.getsockname()[1]
            self.impatient_port: int = second.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
        assert program, "these tests need nginx; on Debian: apt install nginx-light"
        home = Path(self._home.name)
        (home / "nginx.conf").write_text(self._configuration(home))
        self._process = subprocess.Popen([program, "-p", str(home), "-c", "nginx.conf", "-e", str(home / "error.log")])
        self._wait_listening()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(TIMEOUT)
        self._home.cleanup()

    def _configuration(self, home: Path) -> str:
        return _CONFIGURATION.format(
            home=home,
            upstream_port=self._upstream_port,
            port=self.port,
            impatient_port=self.impatient_port,
            impatient_timeout=IMPATIENT_TIMEOUT,
            pool=POOL,
        )

    def connect(self) -> RawClient:
        return RawClient("127.0.0.1", self.port, timeout=TIMEOUT)

    def connect_impatient(self) -> RawClient:
        return RawClient("127.0.0.1", self.impatient_port, timeout=TIMEOUT)

    @property
    def error_log(self) -> str:
        return (Path(self._home.name) / "error.log").read_text()

    def pooled_connections(self) -> set[int]:
        """The local ports of what nginx has open to the server."""
        established = "01"
        ports = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if state == established and int(remote.split(":")[1], 16) == self._upstream_port:
                ports.add(int(local.split(":")[1], 16))
        return ports

    @property
    def access_log(self) -> str:
        return (Path(self._home.name) / "access.log").read_text()

    def _wait_listening(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                self.connect().leave_with_fin()
                return
            except OSError:
                assert self._process.poll() is None, self.error_log
                assert time.monotonic() < deadline, self.error_log
                time.sleep(0.01)


class DeployedNginx(Nginx):
    """The shipped deploy/nginx/headrace.conf before three servers, in two workers."""

    def __init__(self, upstream_ports: Sequence[int]) -> None:
        super().__init__(upstream_ports[0])
        self._upstream_ports = upstream_ports

    def _configuration(self, home: Path) -> str:
        main, _, common = _CONFIGURATION.partition("events {{}}")
        common = common.partition("    client_max_body_size")[0].replace("access_log {home}/access.log;", "")
        shipped = (REPOSITORY / "deploy/nginx/headrace.conf").read_text()
        replaced = {"listen 80;": f"listen 127.0.0.1:{self.port};", "/var/log/nginx/headrace.log": f"{home}/access.log"}
        replaced |= {f":{8001 + index} ": f":{port} " for index, port in enumerate(self._upstream_ports)}
        for old, new in replaced.items():
            assert old in shipped, old
            shipped = shipped.replace(old, new)
        workers = main.replace("master_process off;", "worker_processes 2; user root;") + "events {{}}"
        return (workers + common).format(home=home) + shipped + "}\n"
