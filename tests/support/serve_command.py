"""`headrace serve` with a model that costs nothing, at a port or a Unix socket; and certificates for it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.harness import TIMEOUT, Server
from tests.support.tiny_model import tiny_settings


class ServeCommand(Server):
    """`headrace serve` instead of `hypercorn app:main`, which `hypercorn` (its flags) brings back."""

    def __init__(
        self,
        worker_class: str = "uvloop",
        *,
        client: httpx.Client | None = None,
        hypercorn: list[str] | None = None,
        **settings: object,
    ) -> None:
        super().__init__(worker_class, **tiny_settings(**settings))
        self._hypercorn = hypercorn
        if client is not None:
            self.client = client

    def command(self) -> list[str]:
        if self._hypercorn is not None:
            return ["hypercorn", *self._hypercorn, "--worker-class", self.worker_class, "app:main"]
        return ["app.commands.cli", "serve", "--port", str(self.port), "--worker-class", self.worker_class]


def unix_client(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=TIMEOUT)


def write_certificate(certfile: Path, keyfile: Path, *, passphrase: bytes | None = None) -> None:
    """A certificate that signs itself, for 127.0.0.1 too."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=100))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    kept = serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    keyfile.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kept))
