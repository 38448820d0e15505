"""Tenants by API key: their limits, weights and shares of the queue.

A tenant is named in the TOML file of `api_keys_file`:

    [tenants.search-team]
    keys = ["..."]
    weight = 2.0                # share of the engine relative to others; 1 by default
    max_running = 16            # choices that run at once; no limit by default
    max_queued_requests = 100   # choices that wait for their first token; no limit by default
    requests_per_minute = 600   # no limit by default
    tokens_per_minute = 200000  # of prompts and answers together; no limit by default
    priority_over_others = true # its requests' priorities count against other tenants', too; false by default
    models = ["chat"]           # names of the models that it may use; all by default

or is one of `api_keys`, with a name made from a digest of the key. Without any keys every client is anonymous.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from app.config.setting_types import check_key
from app.config.settings import Settings, SettingsError

MOST_CHOICES = 1_000_000
MOST_PER_MINUTE = 1_000_000_000_000


class Tenant(BaseModel):
    """A tenant, hashed by its name. `weight` is relative to other tenants; a limit of None is no limit.
    Without `priority_over_others` the priority of a request only orders the requests of its own tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    weight: float = Field(default=1.0, ge=0.001, le=1000, allow_inf_nan=False)
    max_running: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_queued_requests: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    requests_per_minute: int | None = Field(default=None, ge=1, le=MOST_PER_MINUTE)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=MOST_PER_MINUTE)
    priority_over_others: bool = Field(default=False, strict=True)
    models: tuple[str, ...] | None = Field(default=None, min_length=1)

    def may_use(self, model_names: Iterable[str]) -> bool:
        """Return True if the tenant may use a model with these names."""
        return self.models is None or not set(self.models).isdisjoint(model_names)

    def precedence(self, priority: int) -> int:
        """Return how much a request's `priority` counts against other tenants' requests."""
        return priority if self.priority_over_others else 0

    def __hash__(self) -> int:
        return hash(self.name)


_OF_A_KEY = re.compile("key-[0-9a-f]{16}")
_PROCESS_KEY = secrets.token_bytes(32)


def shown_name(name: str) -> str:
    """Return a tenant's name for metrics. A name that is the digest of an API key is digested again, with a key of this
    process: with the first digest, a reader of the metrics could test guesses of the API key. The name itself must not
    change, because it salts the KV blocks that are cached on disk."""
    if not _OF_A_KEY.fullmatch(name):
        return name
    return "key-" + hmac.new(_PROCESS_KEY, name.encode(), "sha256").hexdigest()[:16]


ANONYMOUS = Tenant.model_construct(name="")


class _TenantEntry(Tenant):
    keys: list[Annotated[SecretStr, AfterValidator(check_key)]] = Field(min_length=1)


class Tenants:
    """All tenants of a server, found by API key. `required` is True if there are any keys."""

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
        """Return the tenant with this key, or None. Takes constant time: it compares the digests of all keys."""
        given = _digest(key)
        found = None
        for digest, tenant in self._by_digest.items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def replace(self, others: Tenants) -> None:
        """Take over the clients' keys of `others`. The administrators' keys stay."""
        self._by_digest = others._by_digest

    @property
    def all(self) -> Collection[Tenant]:
        """Every tenant; `ANONYMOUS` if there are no keys."""
        return {tenant.name: tenant for tenant in self._by_digest.values()}.values() or (ANONYMOUS,)

    @property
    def administered(self) -> bool:
        """Return True if there are keys of administrators."""
        return bool(self._admin_digests)

    def is_admin(self, key: bytes) -> bool:
        """Return True for a key of an administrator. Takes constant time: it compares the digests of all keys."""
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
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested lists; ValueError: also huge numbers
        raise SettingsError(f"api_keys_file: {path} is not TOML: {error}. {works}") from None
    tables = document.pop("tenants", None)
    # A file without any tenant would leave the server open to every client.
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
                f"{MOST_CHOICES:,}), requests_per_minute and tokens_per_minute (1 to {MOST_PER_MINUTE:,}), "
                f"priority_over_others (true or false), models (a list of names). {works}"
            ) from None
    return entries


def _shown(problem: ErrorDetails) -> str:
    """Return the name of the wrong field, with its value unless that may be an API key."""
    place = ".".join(map(str, problem["loc"]))
    return f"{place} = {problem['input']!r}" if place in Tenant.model_fields and problem["type"] != "missing" else place


# --------------------------------------------------------------------------------------------------------- queue shares
# The shares of tenants in the queue. Half of the queue is reserved, split between tenants by weight; the other half is
# first come, first served.
#
# A reserve has at least one place, if there are enough. Reserved places stay empty when unused, so a tenant's first
# request always finds one. A single tenant has the whole queue. No request costs a loop over all tenants.


def place_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Return the reserved places by tenant: one each, plus a share by weight, at most `max_queued_requests`."""
    reserves = _reserves(limit, tenants, least=1)
    own_limits = {tenant.name: tenant.max_queued_requests for tenant in tenants}
    return {name: min(reserve, own_limits[name] or reserve) for name, reserve in reserves.items()}


def token_reserves(limit: int, tenants: Collection[Tenant]) -> dict[str, int]:
    """Return the reserved tokens of each tenant, by weight."""
    return _reserves(limit, tenants, least=0)


def _reserves(limit: int, tenants: Collection[Tenant], least: int) -> dict[str, int]:
    if len(tenants) < 2:
        return {}
    by_weight = max(0, limit // 2 - least * len(tenants))
    total = sum(tenant.weight for tenant in tenants)
    return {tenant.name: least + int(by_weight * (tenant.weight / total)) for tenant in tenants}


class SharedRoom:
    """The use of the queue's places, or of its tokens, by tenant, and the tenants' reserves.

    `total` never exceeds `limit` if `fits` is asked before every `take`.
    """

    def __init__(self, limit: int, reserves: Mapping[str, int]) -> None:
        self.limit = limit
        self.total = 0
        self._taken: Counter[str] = Counter()
        self.keep(reserves)

    def keep(self, reserves: Mapping[str, int]) -> None:
        """Replace the reserves. What tenants hold stays counted."""
        self._reserves = reserves
        self._promised = sum(reserves.values())
        # If the reserves exceed the limit, half of the limit is kept for all of them, first come, first served.
        self._kept = self._promised if self._promised <= self.limit else self.limit // 2
        # The amount that tenants hold within their reserves.
        self._inside = sum(min(taken, reserves.get(tenant, 0)) for tenant, taken in self._taken.items())

    def taken_by(self, tenant: str) -> int:
        return self._taken[tenant]

    def kept_from(self, tenant: str) -> int:
        """Return the unused amount that is kept for other tenants."""
        own = max(0, self._reserves.get(tenant, 0) - self._taken[tenant])
        return max(0, self._kept - self._inside - own)

    def most_for(self, tenant: str) -> int:
        """Return the amount that this tenant could hold if no other tenant held anything."""
        return self.limit - max(0, self._kept - self._reserves.get(tenant, 0))

    def fits(self, tenant: str, amount: int) -> bool:
        """Return True if the tenant may take so much more: within its reserve, or without using what others reserve."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        if taken + amount <= reserve and self._kept == self._promised:
            return True
        inside = min(taken + amount, reserve) - min(taken, reserve)
        return self.total + amount + max(0, self._kept - self._inside - inside) <= self.limit

    @property
    def is_full(self) -> bool:
        inside = 1 if self._inside < self._promised else 0  # some tenant has not used up its reserve
        if inside and self._kept == self._promised:
            return False
        return self.total + 1 + max(0, self._kept - self._inside - inside) > self.limit

    def take(self, tenant: str, amount: int) -> None:
        """Count an amount that a tenant takes, or frees if it is negative."""
        taken, reserve = self._taken[tenant], self._reserves.get(tenant, 0)
        self.total += amount
        self._inside += min(taken + amount, reserve) - min(taken, reserve)
        self._taken[tenant] = taken + amount
        if not self._taken[tenant]:
            del self._taken[tenant]
