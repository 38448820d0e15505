"""Tenants: whose request it is, by its API key, and what they are entitled to.

A tenant is named in the TOML file of `api_keys_file`:

    [tenants.search-team]
    keys = ["..."]
    weight = 2.0                # share of the engine relative to others; 1 by default
    max_running = 16            # choices that run at once; no limit by default
    max_queued_requests = 100   # choices that wait for their first token; no limit by default
    priority_over_others = true # its requests' priorities count against other tenants', too; false by default

or is simply one of `api_keys`, with a name made from a digest of the key. Without any keys everybody is anonymous.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from app.setting_types import check_key
from app.settings import Settings, SettingsError

MOST_CHOICES = 1_000_000


class Tenant(BaseModel):
    """Compared and hashed by name. `weight` is relative; the limits count choices, None is no limit. Without
    `priority_over_others` a request's priority orders its own tenant's requests only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    weight: float = Field(default=1.0, ge=0.001, le=1000, allow_inf_nan=False)
    max_running: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_queued_requests: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    priority_over_others: bool = Field(default=False, strict=True)

    def precedence(self, priority: int) -> int:
        """What a priority that one of its requests asks for counts against the requests of other tenants."""
        return priority if self.priority_over_others else 0

    def __hash__(self) -> int:
        return hash(self.name)


_OF_A_KEY = re.compile("key-[0-9a-f]{16}")
_PROCESS_KEY = secrets.token_bytes(32)


def shown_name(name: str) -> str:
    """Return a tenant's name for metrics. A name that is the digest of an API key is digested again, with a key of this
    process: a reader of the metrics could test guesses of the API key on the digest itself. The name itself must not
    change, because it salts the KV blocks that are cached on disk."""
    if not _OF_A_KEY.fullmatch(name):
        return name
    return "key-" + hmac.new(_PROCESS_KEY, name.encode(), "sha256").hexdigest()[:16]


ANONYMOUS = Tenant.model_construct(name="")


class _TenantEntry(Tenant):
    keys: list[Annotated[SecretStr, AfterValidator(check_key)]] = Field(min_length=1)


class Tenants:
    """All tenants of a server, found by key. `required` says whether there are any keys at all."""

    def __init__(self, settings: Settings) -> None:
        self._by_digest: dict[bytes, Tenant] = {}
        for key in settings.api_keys:
            name = hashlib.sha256(key.get_secret_value().encode()).hexdigest()[:16]
            self._add(key, Tenant(name=f"key-{name}"))
        if settings.api_keys_file is not None:
            for entry in _read(settings.api_keys_file):
                tenant = Tenant(**entry.model_dump(exclude={"keys"}))
                for key in entry.keys:
                    self._add(key, tenant)
        self.required = bool(self._by_digest)
        self._admin_digests = [_digest(key.get_secret_value().encode()) for key in settings.admin_keys]
        if not self._by_digest.keys().isdisjoint(self._admin_digests):
            raise SettingsError("admin_keys: one of them is a client's key, too. Give administrators their own.")

    def find(self, key: bytes) -> Tenant | None:
        """Whose key this is. Compares with every key, in a time that tells nothing about how close it came."""
        given = _digest(key)
        found = None
        for digest, tenant in self._by_digest.items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def replace(self, others: Tenants) -> None:
        """Take over the clients' keys of `others`. Administrators stay."""
        self._by_digest = others._by_digest

    @property
    def all(self) -> Collection[Tenant]:
        """Everybody whose requests there may be."""
        return {tenant.name: tenant for tenant in self._by_digest.values()}.values() or (ANONYMOUS,)

    @property
    def administered(self) -> bool:
        """Whether there are keys of administrators."""
        return bool(self._admin_digests)

    def is_admin(self, key: bytes) -> bool:
        """Whether this is an administrator's key."""
        given = _digest(key)
        return sum(hmac.compare_digest(given, digest) for digest in self._admin_digests) > 0

    def _add(self, key: SecretStr, tenant: Tenant) -> None:
        digest = _digest(key.get_secret_value().encode())
        if digest in self._by_digest:
            raise SettingsError(f"api_keys: a key of tenant {tenant.name!r} is given twice. Give every tenant its own.")
        self._by_digest[digest] = tenant


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> list[_TenantEntry]:
    works = 'A file that works: [tenants.acme] with keys = ["a-secret"]'
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"api_keys_file: cannot read {path}: {error.strerror}. {works}") from None
    except (ValueError, RecursionError) as error:  # of numbers and of lists in lists, too, not of TOML alone
        raise SettingsError(f"api_keys_file: {path} is not TOML: {error}. {works}") from None
    tables = document.pop("tenants", None)
    # A file without any tenant would open the server to everybody.
    if document or not isinstance(tables, dict) or not tables or not all(isinstance(t, dict) for t in tables.values()):
        raise SettingsError(f"api_keys_file: {path} must hold tables named tenants.<name> and nothing else. {works}")
    entries = []
    for name, table in tables.items():
        try:
            entries.append(_TenantEntry(name=name, **table))
        except (ValidationError, TypeError) as error:
            wrong = ", ".join(map(_shown, error.errors())) if isinstance(error, ValidationError) else "name"
            raise SettingsError(
                f"api_keys_file: tenants.{name} in {path} is wrong at {wrong}: allowed are keys (a list of strings "
                f"without blanks around them), weight (0.001 to 1000), max_running and max_queued_requests (1 to "
                f"{MOST_CHOICES:,}), priority_over_others (true or false). {works}"
            ) from None
    return entries


def _shown(problem: ErrorDetails) -> str:
    """Where a table is wrong, and what was given there unless it may be a key."""
    place = ".".join(map(str, problem["loc"]))
    return f"{place} = {problem['input']!r}" if place in Tenant.model_fields and problem["type"] != "missing" else place
