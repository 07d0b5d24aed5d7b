"""Who is calling: from an `Authorization` header to a principal, or a 401.

`KeyStore` owns the keys in memory. It looks at the key file's status once a second at most and re-reads it when it has
changed; when the new content cannot be read, the keys it has stay in force and the failure is logged and counted.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

from gateway.admission import api_keys, watermark_secrets
from gateway.admission.api_keys import KeyRecord, TenantRecord, hash_key
from gateway.admission.watermark_secrets import Marked, WatermarkRecord
from gateway.config import PROBE_KEY_ID
from gateway.errors import ApiError, model_not_found
from gateway.http1.body import BodyOwner
from gateway.metrics import GatewayMetrics
from shared.errors import ConfigError

CHECK_INTERVAL_S = 1.0
MAX_KEY_BYTES = 512
BOOTSTRAP_KEY_ID = "bootstrap"
NO_KEY_ID = "none"
_DIGEST = "digest of the key"
_WHERE_KEYS_ARE = (
    "The operator makes keys with `headrace keys create`; that of `headrace up` is api_key in its state directory."
)

_PORT = re.compile(r":[0-9]+\Z")
_logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]
FileState = tuple[int, int, int]
Holder = tuple[str, float | None, "Principal"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller with a valid key. A limit of None means unlimited; `models` of None allows all.

    `watermark` is the secret that marks its answers, the key's or else the tenant's; None for unmarked answers.
    """

    key_id: str
    tenant: str
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    reads_per_minute: int | None = None
    max_priority: int | None = None
    weight: float = 1.0
    tenant_limits: TenantRecord | None = None
    watermark: str | None = field(default=None, repr=False)

    @property
    def is_unlimited(self) -> bool:
        """Whether no limit applies to its generations."""
        own = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent, self.tenant_limits)
        return own.count(None) == len(own)

    @property
    def is_probe(self) -> bool:
        """Whether it only checks that models answer, which counts for no tenant."""
        return self.key_id == PROBE_KEY_ID

    @property
    def body_owner(self) -> BodyOwner:
        """The key and tenant that its bodies count against while they arrive."""
        return BodyOwner(self.key_id, self.max_concurrent, self.tenant)

    def can_use(self, model: str) -> bool:
        """Tell whether the key may use a model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Refuse a model that the key may not use with the `ApiError` 404 of one that does not exist."""
        if self.models is not None and model not in self.models:
            raise model_not_found(model)

    def check_priority(self, priority: int) -> None:
        """Refuse a priority above the key's, which would push back others' requests, by an `ApiError` 400."""
        if self.max_priority is not None and priority > self.max_priority:
            message = f"'priority' is {priority}, and this key allows at most {self.max_priority}."
            raise ApiError(400, message, param="priority", code="invalid_value")


class KeyStore:
    """The valid keys: those of the file, and two of the settings, unlimited and of the tenant `default`.

    Raises:
        ConfigError: There is no key at all to let anyone in with, or the file is not a key file.
    """

    def __init__(
        self,
        path: Path | None,
        api_key: str | None,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        probe_key: str | None = None,
        asks_for_key: bool = True,
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._clock = clock
        self._next_check = clock() + CHECK_INTERVAL_S
        self._bootstrap = hash_key(api_key) if api_key else None
        self._probe = hash_key(probe_key) if probe_key else None
        self._states = self._stat()
        self._has_key_file = self._states[0] is not None
        self._asks_for_key = asks_for_key
        if asks_for_key and not self._has_key_file and self._bootstrap is None:
            missing = f"{path} does not exist" if path else "no key file is set"
            made = "`headrace keys create` and give its file, HEADRACE_KEYS_FILE=.headrace/keys.json,"
            made = f"`headrace keys --keys-file {path} create`," if path else made
            raise ConfigError(
                "HEADRACE_KEYS_FILE",
                f"{missing}, and HEADRACE_API_KEY is empty, so no client could use this gateway. "
                f"Make a key with {made} or set HEADRACE_API_KEY.",
            )
        self._index(*self._read())

    def authenticate(self, headers: Headers, notes: dict[str, str] | None = None) -> Principal:
        """Return the holder of the key shown; without configured keys, any client of this machine except a web page.

        `notes` caches values derived from these headers; see `RequestHead`.

        Raises:
            ApiError: 401; the key is missing, malformed or unknown.
        """
        if self._clock() >= self._next_check:
            self._reload_if_changed()
        try:
            return self._holder(headers, {} if notes is None else notes)
        except ApiError:
            if self._asks_for_key:
                raise
            if may_be_web_page(headers):
                message = "Web pages need an API key here. Send it as `Authorization: Bearer <key>`."
                raise unauthorized(message) from None
            return self._nobody

    def _holder(self, headers: Headers, notes: dict[str, str]) -> Principal:
        digest = notes.get(_DIGEST)
        if digest is None:
            digest = notes[_DIGEST] = hash_key(shown_key(headers))
        principal = self._principals.get(digest)
        # The look-up compares hashes of the sent key, so its timing reveals nothing of a key; this makes it explicit.
        if principal is None or not hmac.compare_digest(principal[0], digest):
            shown_in = "x-api-key" if any(name == b"x-api-key" for name, _ in headers) else "Authorization"
            problem = f"Incorrect API key provided: this server knows none like that in `{shown_in}`."
            raise unauthorized(f"{problem} {_WHERE_KEYS_ARE}")
        _, expires, holder = principal
        if expires is not None and expires <= time.time():
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
            raise unauthorized(f"This API key has expired ({when}). Ask the operator for a new one.")
        return holder

    def listing(self) -> tuple[list[KeyRecord], list[TenantRecord]]:
        """Return the key file's records and the tenants' limits as they are on disk; `ConfigError` if unreadable."""
        records, tenants, _ = self._read()
        return records, tenants

    def watermark_of(self, tenant: str, key_id: str) -> str | None:
        """Return the secret that marks answers to a key: its own, or else its tenant's; None where none are marked."""
        if self._clock() >= self._next_check:
            self._reload_if_changed()
        return self._secret_of(tenant, key_id)

    def _secret_of(self, tenant: str, key_id: str) -> str | None:
        own = self._watermarks.get(Marked(tenant, key_id))
        return own or self._watermarks.get(Marked(tenant))

    def _read(self) -> tuple[list[KeyRecord], list[TenantRecord], list[WatermarkRecord]]:
        path = self._path
        if path is None:
            return [], [], []
        return api_keys.list_keys(path), api_keys.list_tenants(path), watermark_secrets.list_watermarks(path)

    def _index(self, records: list[KeyRecord], tenants: list[TenantRecord], watermarks: list[WatermarkRecord]) -> None:
        self._watermarks = watermark_secrets.secrets_in_use(watermarks, records)
        limits = {record.tenant: record for record in tenants}
        self._principals: dict[str, Holder] = {}
        for record in records:
            if record.revoked is None:
                secret = self._secret_of(record.tenant, record.id)
                holder = _principal(record, limits.get(record.tenant), secret)
                self._principals[record.sha256] = (record.sha256, record.expires, holder)
        secret = self._watermarks.get(Marked("default"))
        self._nobody = Principal(NO_KEY_ID, "default", tenant_limits=limits.get("default"), watermark=secret)
        if self._bootstrap is not None:
            own = replace(self._nobody, key_id=BOOTSTRAP_KEY_ID)
            self._principals[self._bootstrap] = (self._bootstrap, None, own)
        if self._probe is not None:
            self._principals[self._probe] = (self._probe, None, Principal(PROBE_KEY_ID, "default"))

    def _stat(self) -> tuple[FileState | None, ...]:
        path = self._path
        if path is None:
            return (None,)
        beside = api_keys.tenants_file(path), watermark_secrets.watermarks_file(path)
        return tuple(map(_state, (path, *beside)))

    def _reload_if_changed(self) -> None:
        self._next_check = self._clock() + CHECK_INTERVAL_S
        states = self._stat()
        if self._path is None or states == self._states:
            return
        self._states = states
        try:
            read = self._read()
            if self._has_key_file and states[0] is None:
                raise ConfigError("HEADRACE_KEYS_FILE", f"{self._path} has disappeared")
        except ConfigError as error:
            self._metrics.key_reload_failures += 1
            self._metrics.is_keys_file_unread = True
            _logger.error("keys not reloaded, the old ones stay in force: %s", error)
            return
        self._metrics.is_keys_file_unread = False
        self._has_key_file = states[0] is not None
        self._index(*read)
        _logger.info("keys reloaded: %d valid", len(self._principals))


def _state(path: Path) -> FileState | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def check_auth_settings(*, asks_for_key: bool, host: str) -> None:
    """Let a gateway ask for no key only where this machine alone reaches it; otherwise a `ConfigError`."""
    if not asks_for_key and not is_loopback(host):
        problem = f"asking for no key is allowed on loopback only, and HEADRACE_HOST is {host}"
        raise ConfigError("HEADRACE_AUTH", problem)


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine alone."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def may_be_web_page(headers: Headers) -> bool:
    """Return whether a browser may have sent this request for a page of another site: such a page reaches loopback too.

    A page names its origin where it may not simply read; a page whose name resolves to this machine (DNS rebinding)
    sends its own name as the host.
    """
    hosts = [_PORT.sub("", value.decode("latin-1")) for name, value in headers if name == b"host"]
    return any(name == b"origin" for name, _ in headers) or not all(map(is_loopback, hosts))


def shown_key(headers: Headers) -> str:
    """Return the key that a request shows.

    OpenAI's clients send it in `Authorization`, Anthropic's in `x-api-key`, Azure's in `api-key`.

    Raises:
        ApiError: 401; it shows none, or several.
    """
    keys = [value.strip() for name, value in headers if name in (b"x-api-key", b"api-key")]
    if not keys:
        return bearer_token(headers)
    key = keys[0].decode("utf-8", "surrogateescape")
    has_bearer = any(name == b"authorization" for name, _ in headers)
    if len(keys) > 1 or not key or len(key) > MAX_KEY_BYTES or (has_bearer and bearer_token(headers) != key):
        raise unauthorized("Send one API key: as `Authorization: Bearer <key>` or as `x-api-key: <key>`.")
    return key


def bearer_token(headers: Headers) -> str:
    """Return the key of an `Authorization: Bearer` header; `ApiError` 401 if there is none, or several."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        how = "Send it as `Authorization: Bearer <key>` or as `x-api-key: <key>`."
        raise unauthorized(f"You didn't provide an API key. {how}")
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    if scheme.lower() == b"bearer" and not token:
        raise unauthorized("No key stands after `Bearer`: the variable that it comes from may be empty.")
    if len(values) > 1 or scheme.lower() != b"bearer" or len(token) > MAX_KEY_BYTES:
        raise unauthorized("The Authorization header must be `Bearer <key>`, once.")
    return token.decode("utf-8", "surrogateescape")


def unauthorized(message: str) -> ApiError:
    """Return the 401 that asks for a key."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": 'Bearer realm="headrace"'})


def _principal(record: KeyRecord, tenant_limits: TenantRecord | None, watermark: str | None) -> Principal:
    return Principal(
        key_id=record.id,
        tenant=record.tenant,
        models=None if api_keys.ALL_MODELS in record.models else frozenset(record.models),
        requests_per_minute=record.requests_per_minute,
        tokens_per_minute=record.tokens_per_minute,
        max_concurrent=record.max_concurrent,
        reads_per_minute=record.reads_per_minute,
        max_priority=record.max_priority,
        weight=record.weight,
        tenant_limits=tenant_limits,
        watermark=watermark,
    )
