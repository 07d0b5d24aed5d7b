"""The `HEADRACE_*` variables that are set, without their secrets, and what they name: files, Redis, a gateway.

URLs are shown without logins, and without queries, which hold passwords and keys too.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.admission.api_keys import list_keys, list_tenants
from gateway.cache.redis_client import check_redis_url
from ops.doctor.finding import Finding, problem, warning
from ops.stack.state import keys_file_of
from shared.config import PREFIX
from shared.errors import ConfigError
from shared.objects.open import opened_store
from shared.objects.store import StoreError, put
from shared.urls import is_http_url

HIDDEN = "(hidden)"
# A list of servers; a comma within a password is followed by no scheme.
_BETWEEN = re.compile(r",\s*(?=[a-z][a-z0-9+.-]*://)")
_SECRET = re.compile(r"KEY|PASSWORD|TOKEN|SECRET|SEED")
_FILE = re.compile(r"_(FILE|DIR|HOST|PORT)$")
_URL = re.compile(r"_(URL|ENDPOINT)$")
_OTHERS = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each variable that is set; the command itself has refused those that nothing reads."""
    names = sorted(name for name in environ if name.startswith(PREFIX)) + [name for name in _OTHERS if name in environ]
    if not names:
        yield Finding("settings", "no HEADRACE_* variable is set")
    for name in names:
        yield Finding("settings", f"{name}={shown_value(name, environ[name])}")


def shown_value(name: str, value: str) -> str:
    """Return a variable's value as it may be shown to strangers."""
    if _SECRET.search(name) and not _FILE.search(name):
        return HIDDEN if value else "(empty)"
    return shown_url(value) if "://" in value or _URL.search(name) else value


def shown_url(text: str) -> str:
    """Return URLs, or hosts, without possible secrets, even if malformed."""
    return ",".join(_shown(part) for part in _BETWEEN.split(text))


def place_of(text: str) -> str:
    """Return the hosts and ports of URLs alone."""
    places = [shown.rpartition("://")[2] for shown in shown_url(text).split(",")]
    return ", ".join(place.removeprefix(f"{HIDDEN}@") for place in places)


def _shown(url: str) -> str:
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    login, _, place = rest.rpartition("@")
    if "?" in login:
        # Either may hold the other's sign: where the login ends cannot be told.
        return f"{scheme}{separator}{HIDDEN}"
    place, has_query, _ = place.partition("?")
    return f"{scheme}{separator}{HIDDEN + '@' if login else ''}{place}{'?' + HIDDEN if has_query else ''}"


def key_findings(named: Path | None, state_dir: Path) -> Iterator[Finding]:
    """Report the key file that was named, or a state directory's, which may have none.

    Gateways that run keep the keys they have; one that starts does not start with a file that cannot be read.
    """
    path = named or keys_file_of(state_dir)
    if not path.exists():
        if named is not None:
            yield problem("keys", f"{path} does not exist", "`headrace keys create` makes it")
        return
    try:
        records, tenants = list_keys(path), list_tenants(path)
    except ConfigError as error:
        remedy = "mend it, or put a copy back: gateways that run keep the keys they have, and none can start"
        yield problem("keys", error.problem, remedy)
        return
    now = time.time()
    valid = sum(record.is_valid(now) for record in records)
    limited = f"; limits of {len(tenants)} tenants" if tenants else ""
    yield Finding("keys", f"{path}: {valid} of {len(records)} keys are valid{limited}")


_LITTLE_BYTES = 1 << 30
_PROBE = "headrace/store/probe"


def file_findings(files: str | None, state_dir: Path) -> list[Finding]:
    """Report the store that a setting names, or that of a state directory, which may have none."""
    place = files or str(state_dir / "files")
    if files is None and not Path(place).is_dir():
        return []
    return asyncio.run(_findings(place))


async def _findings(files: str) -> list[Finding]:
    effect = "uploads are refused and batches wait until it can be used"
    try:
        store, name = await opened_store(files, "HEADRACE_FILES")
    except ConfigError as error:
        return [problem("files", error.problem, effect)]
    try:
        await put(store, _PROBE, b"probe")
        await store.delete(_PROBE)
        found = [Finding("files", f"{store.place} can be written; every gateway must have it ({name[:8]})")]
    except StoreError as error:
        return [problem("files", str(error), effect)]
    finally:
        await store.close()
    if store.is_local and (free := shutil.disk_usage(files).free) < _LITTLE_BYTES:
        remedy = "delete files, or enlarge the disk: uploads are refused when it is full"
        found.append(warning("files", f"{store.place} has {free >> 20} MB free", remedy))
    return found


async def redis_finding(url: str | None) -> Finding:
    """Connect to Redis once."""
    if url is None:
        return Finding("redis", "not used: no shared cache, limits count per gateway")
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    try:
        check_redis_url(url)
    except ConfigError as error:
        # Gateways that are given it do not start.
        return problem("redis", f"its URL {error.problem}", "correct HEADRACE_REDIS_URL")
    place = place_of(url)
    try:
        async with Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as redis:
            began = time.monotonic()
            await redis.ping()
            text = f"{place} answers in {(time.monotonic() - began) * 1e3:.1f} ms"
            return Finding("redis", text)
    except (RedisError, OSError) as error:
        remedy = "start it, or check HEADRACE_REDIS_URL and its password; requests are served without it"
        return warning("redis", f"{place} cannot be used: {error}", remedy)


def gateway_findings(url: str) -> Iterator[Finding]:
    """Ask a gateway whether it is ready."""
    import http.client

    shown = shown_url(url)
    if not is_http_url(url):
        yield problem("gateway", f"{shown} is no URL of a server", "give HEADRACE_URL as http://host:port")
        return
    place = urlsplit(url)
    kind: Any = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname, place.port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        body = response.read(300).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        yield problem("gateway", f"{shown} does not answer: {error}", "start it, or give --url of one that runs")
        return
    finally:
        connection.close()
    if response.status == http.client.OK:
        yield Finding("gateway", f"{shown} is ready")
    else:
        told = f"{shown} is not ready ({response.status}): {body}"
        yield problem("gateway", told, "see `nats` above" if "no_queue" in body else "see `workers` above")
