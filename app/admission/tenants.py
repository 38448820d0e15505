"""Tenants by API key: their limits, weights and shares of the queue.

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
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from app.config.settings import Settings, SettingsError, check_key

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


# --------------------------------------------------------------------------------------------------------- queue shares
# How tenants share the queue: half of it is kept for those that hold less than their part, the rest is for whoever
# comes first.
#
# A tenant's part is its reserve: by weight, and of places at least one, where there is one for each tenant. What is
# kept is not handed out to others even if nobody asks for it, so whoever comes finds its reserve free. A lone tenant
# has the whole queue. Everything is counted as it changes; nothing here goes over all tenants after the start.


def place_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Places for each tenant: one, and of the rest of the half by weight. None that its own limit makes useless."""
    reserves = _reserves(limit, tenants, least=1)
    own_limits = {tenant.name: tenant.max_queued_requests for tenant in tenants}
    return {name: min(reserve, own_limits[name] or reserve) for name, reserve in reserves.items()}


def token_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Tokens for each tenant, by weight."""
    return _reserves(limit, tenants, least=0)


def _reserves(limit: int, tenants: Collection[Tenant], least: int) -> dict[str, int]:
    if len(tenants) < 2:
        return {}
    by_weight = max(0, limit // 2 - least * len(tenants))
    total = sum(tenant.weight for tenant in tenants)
    return {tenant.name: least + int(by_weight * (tenant.weight / total)) for tenant in tenants}


class SharedRoom:
    """One measure of the queue, places or tokens: what is taken of it, by whom, and what is kept for whom.

    `total` never exceeds `limit` as long as nothing is taken that does not fit.
    """

    def __init__(self, limit: int, reserves: Mapping[str, int]) -> None:
        self.limit = limit
        self.total = 0
        self._taken: Counter[str] = Counter()
        self.keep(reserves)

    def keep(self, reserves: Mapping[str, int]) -> None:
        """From now on these are the reserves. What is taken stays taken."""
        self._reserves = reserves
        self._promised = sum(reserves.values())
        # Of more reserves than there is room, half of the room is kept for those who come first.
        self._kept = self._promised if self._promised <= self.limit else self.limit // 2
        # What tenants have taken within their reserves.
        self._inside = sum(min(taken, reserves.get(tenant, 0)) for tenant, taken in self._taken.items())

    def taken_by(self, tenant: str) -> int:
        """What this tenant has taken."""
        return self._taken[tenant]

    def kept_from(self, tenant: str) -> int:
        """What is kept for others just now."""
        own = max(0, self._reserves.get(tenant, 0) - self._taken[tenant])
        return max(0, self._kept - self._inside - own)

    def most_for(self, tenant: str) -> int:
        """What this tenant could take if nobody else had taken anything."""
        return self.limit - max(0, self._kept - self._reserves.get(tenant, 0))

    def fits(self, tenant: str, amount: int) -> bool:
        """Whether the tenant may take so much more: it stays within its reserve, or leaves what is kept for others."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        if taken + amount <= reserve and self._kept == self._promised:
            return True
        inside = min(taken + amount, reserve) - min(taken, reserve)
        return self.total + amount + max(0, self._kept - self._inside - inside) <= self.limit

    @property
    def is_full(self) -> bool:
        """Whether no tenant at all may take any more."""
        inside = 1 if self._inside < self._promised else 0  # somebody has not used up its reserve
        if inside and self._kept == self._promised:
            return False
        return self.total + 1 + max(0, self._kept - self._inside - inside) > self.limit

    def take(self, tenant: str, amount: int) -> None:
        """Account for what a tenant takes, or gives back if it is negative."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        self.total += amount
        self._inside += min(taken + amount, reserve) - min(taken, reserve)
        self._taken[tenant] = taken + amount
        if not self._taken[tenant]:
            del self._taken[tenant]
