"""`headrace serve` with a certificate: clients that check it, streams, and a new one while the server runs."""

from __future__ import annotations

import re
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from app.config.settings import Settings, SettingsError
from app.http.listening import Certificate
from tests.selection import slow_except
from tests.support.harness import TIMEOUT, free_port
from tests.support.serve_command import ServeCommand, write_certificate

LOOPS = ["uvloop", "asyncio", "trio"]
MAX_CONNECTIONS = 50
NAMES = ("first-name", "second/name", "third-name")


class Secured(NamedTuple):
    server: ServeCommand
    certfile: Path
    keyfile: Path

    def trusting(self, certfile: Path) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(certfile))

    def presented(self) -> bytes:
        """The certificate that a new connection gets."""
        return ssl.get_server_certificate(("127.0.0.1", self.server.port)).encode()


@pytest.fixture(scope="module", params=slow_except(LOOPS, "uvloop"))
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    certfile, keyfile = folder / "tls.crt", folder / "tls.key"
    write_certificate(certfile, keyfile)
    (folder / "trusted.crt").write_bytes(certfile.read_bytes())
    settings: dict[str, Any] = {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "served_model_name": ",".join(NAMES)}
    settings |= {"max_connections": MAX_CONNECTIONS, "body_timeout": 2 * TIMEOUT}
    with ServeCommand(request.param, **settings) as server:
        context = ssl.create_default_context(cafile=str(folder / "trusted.crt"))
        server.client = httpx.Client(
            base_url=f"https://localhost:{server.port}", verify=context, timeout=TIMEOUT, trust_env=False
        )
        yield Secured(server.wait_ready(), certfile, keyfile)
        assert "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_the_openai_sdk_checks_the_certificate_and_gets_the_name_that_it_asked_for(secured: Secured) -> None:
    base_url = f"https://localhost:{secured.server.port}/v1"
    with openai.DefaultHttpxClient(verify=secured.trusting(secured.certfile), timeout=TIMEOUT) as http:
        sdk = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http)
        assert [card.id for card in sdk.models.list()] == list(NAMES)
        for name in NAMES:
            assert sdk.models.retrieve(name).id == name
            answer = sdk.completions.create(model=name, prompt="Hi", max_tokens=3, temperature=0)
            assert answer.model == name
            chunks = list(sdk.completions.create(model=name, prompt="Hi", max_tokens=3, temperature=0, stream=True))
            assert {chunk.model for chunk in chunks} == {name}
            assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
            assert sdk.responses.create(model=name, input="Hi", max_output_tokens=2).model == name
        with pytest.raises(openai.NotFoundError, match="fourth-name"):
            sdk.completions.create(model="fourth-name", prompt="Hi", max_tokens=1)


def test_a_client_that_does_not_trust_it_leaves(secured: Secured) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://localhost:{secured.server.port}/livez", trust_env=False)
    assert secured.server.client.get("/livez").status_code == 200


def test_a_long_answer_comes_whole_and_many_streams_at_once(secured: Secured) -> None:
    body: dict[str, Any] = {
        "prompt": "Hi",
        "max_tokens": 500,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    whole = secured.server.complete(**body)
    assert len(whole["choices"][0]["token_ids"]) == 500
    with secured.server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.read().count(b"data: ") > 100


def test_tls_before_1_2_and_plain_http_are_refused(secured: Secured) -> None:
    def hello(version: ssl.TLSVersion) -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        with (
            socket.create_connection(("127.0.0.1", secured.server.port)) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            return wrapped.version()

    assert (hello(ssl.TLSVersion.TLSv1_2), hello(ssl.TLSVersion.TLSv1_3)) == ("TLSv1.2", "TLSv1.3")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises((ssl.SSLError, ConnectionError)):
        hello(ssl.TLSVersion.TLSv1_1)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secured.server.port}/livez", trust_env=False)
    if secured.server.worker_class != "trio":  # whose handshake is out of sight
        said = "A client spoke HTTP, and this port is HTTPS. What works: https:// in its URL"
        secured.server.poll(lambda: secured.server.log, lambda log: said in log)  # after the connection has ended
    assert secured.server.client.get("/livez").status_code == 200


def test_connections_without_a_handshake_count_and_give_way(secured: Secured) -> None:
    with ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection(("127.0.0.1", secured.server.port)))
            for _ in range(2 * MAX_CONNECTIONS)
        ]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02")  # the beginning of a handshake
        poller = select.poll()
        for connection in silent:
            poller.register(connection, select.POLLIN | select.POLLRDHUP)
        secured.server.poll(lambda: len(poller.poll(0)), lambda closed: closed >= MAX_CONNECTIONS)
        assert secured.presented()
        assert secured.server.client.get("/livez").status_code == 200


def test_clients_that_leave_or_send_on_at_any_moment_leave_no_trace_in_the_log(secured: Secured) -> None:
    server, certfile, _ = secured
    context = secured.trusting(certfile)
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    before = len(server.log)

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)

    for first in (b"", b"\x16\x03\x01\x02", request, bytes(100)):  # and no handshake
        with connect() as plain:
            plain.sendall(first)
    for last in (b"", request[:-2], request, b"\xff" * 500):
        with connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as wrapped:
            wrapped.sendall(last)
    with connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as wrapped:
        wrapped.sendall(request)
        assert wrapped.recv(2**16).startswith(b"HTTP/1.1 200")
        with suppress(OSError):  # the server has ended TLS, and then the connection
            for _ in range(100):
                wrapped.sendall(bytes(20_000))
    with (
        connect() as plain,
        socket.socket(fileno=context.wrap_socket(plain, server_hostname="localhost").detach()) as unwrapped,
    ):
        unwrapped.sendall(bytes(500))
        with suppress(OSError):
            unwrapped.recv(100)
    assert server.client.get("/livez").status_code == 200
    said = [line for line in server.log[before:].splitlines() if '"level": "info"' not in line]
    assert not [line for line in said if "Traceback" in line or "SSL" in line or "ssl" in line], said


@pytest.mark.slow
def test_sighup_takes_a_new_certificate_and_keeps_the_old_one_for_a_bad_one(secured: Secured) -> None:
    server, certfile, keyfile = secured
    first = certfile.read_bytes()
    assert secured.presented() == first

    def hang_up(said: str) -> None:
        before = server.log.count(said)
        server.send_signal(signal.SIGHUP)
        server.poll(lambda: server.log.count(said), lambda count: count > before)

    with server.client.stream(  # begun under the old certificate, it goes on
        "POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    ) as stream:
        events = stream.iter_lines()
        next(events)
        certfile.write_bytes(b"nothing")
        hang_up("The certificate stays as it was")
        assert secured.presented() == first
        write_certificate(certfile, keyfile.with_name("other.key"))  # which is not its key
        hang_up("The certificate stays as it was")
        assert "KEY_VALUES_MISMATCH" in server.log
        assert secured.presented() == first
        write_certificate(certfile, keyfile)
        hang_up("The certificate was read again")
        assert secured.presented() == certfile.read_bytes() != first
        assert [line for line in events if line][-1] == "data: [DONE]"
    (certfile.parent / "trusted.crt").write_bytes(certfile.read_bytes())
    with httpx.Client(verify=secured.trusting(certfile), timeout=TIMEOUT, trust_env=False) as client:
        assert client.get(f"https://localhost:{server.port}/livez").status_code == 200


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certfile, keyfile, other = tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "other.key"

    def refusal(key: Path | None = keyfile) -> str:
        with pytest.raises(SettingsError, match="^ssl_certfile, ssl_keyfile: cannot use .*tls.crt with ") as refused:
            Certificate.of(Settings(ssl_certfile=certfile, ssl_keyfile=key))
        return str(refused.value)

    assert "tls.crt: No such file" in refusal()
    write_certificate(certfile, keyfile)
    Certificate.of(Settings(ssl_certfile=certfile, ssl_keyfile=keyfile))
    keyfile.rename(other)
    assert "tls.key: No such file" in refusal()
    assert re.search("PEM|KEY|START", refusal(None)), "the certificate's file has no key"
    write_certificate(certfile, keyfile, passphrase=b"secret")
    assert "without a passphrase" in refusal()
    assert "KEY_VALUES_MISMATCH" in refusal(other)
    certfile.write_bytes(b"")
    assert "cannot use" in refusal()


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "tls.crt", tmp_path / "tls.key"
    write_certificate(certfile, keyfile)
    certfile.write_bytes(keyfile.read_bytes() + certfile.read_bytes())
    assert Certificate.of(Settings(ssl_certfile=certfile)) is not None
    with pytest.raises(SettingsError, match="ssl_keyfile: got .*tls.key, and no ssl_certfile"):
        Certificate.of(Settings(ssl_keyfile=keyfile))


def test_a_server_with_a_bad_certificate_ends_before_it_listens(tmp_path: Path) -> None:
    with ServeCommand(ssl_certfile=tmp_path / "nowhere.crt") as server:
        assert server.wait_exit() == 1
        assert server.log.startswith("error: ssl_certfile, ssl_keyfile: cannot use")


@pytest.mark.parametrize("setting", slow_except(["ssl_certfile", "uds"], "uds"))
def test_hypercorn_refuses_what_it_would_not_obey(setting: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {setting: tmp_path / "file"}
    with ServeCommand(hypercorn=["--bind", f"127.0.0.1:{free_port()}"], **settings) as server:
        assert server.wait_exit() != 0
        assert server.log.splitlines()[-1].startswith(f"error: {setting}: got {tmp_path}/file; only headrace serve")


@pytest.mark.slow
def test_hypercorns_own_tls_serves_the_application(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "tls.crt", tmp_path / "tls.key"
    write_certificate(certfile, keyfile)
    port = free_port()
    flags = ["--bind", f"127.0.0.1:{port}", "--certfile", str(certfile), "--keyfile", str(keyfile)]
    client = httpx.Client(
        base_url=f"https://localhost:{port}",
        verify=ssl.create_default_context(cafile=str(certfile)),
        timeout=TIMEOUT,
        trust_env=False,
    )
    with ServeCommand(hypercorn=flags, client=client) as server:
        server.wait_ready()
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "stream": True}
        assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
