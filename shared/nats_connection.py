"""Connecting to NATS, the same way in every process, and what to do where that fails.

A connection notices a dead server within seconds, reconnects for ever with a short pause, and uses an inbox prefix of
its role, so that accounts can be limited to their own inboxes. What to do after a reconnect is the caller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import AuthorizationError
from nats.errors import Error as NatsError

from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.nats_client import ClearTextError, NatsClient, TlsClient
from shared.nats_files import NatsFiles, identity_options, is_tls_required, tls_context
from shared.subjects import served_by
from shared.urls import check_url, login_in

ErrorCallback = Callable[[Exception], Awaitable[None]]

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_VALID_NOW = (9, 10)
_MAX_KEPT = 10


class ConnectionErrors:
    """Keeps the latest errors of a connection; one that is refused before it was ever made does not try again.

    Attributes:
        failures: The latest errors.
        was_connected: Whether the connection has been made once.
        is_checking: Errors are expected, and only kept.
    """

    def __init__(self, client: Client, on_error: ErrorCallback | None) -> None:
        self._client = client
        self._on_error = on_error
        self.failures: list[Exception] = []
        self.was_connected = False
        self.is_checking = False

    async def report(self, error: Exception) -> None:
        """Keep an error that the client reports, and pass it on."""
        self.failures = [*self.failures[1 - _MAX_KEPT :], error]
        if self.is_checking:
            return
        if self._client.is_connected:
            if self._on_error is None and not _is_reported_elsewhere(error):
                _log.warning("NATS reports: %s", error)
        elif is_refusal(error) and not self.was_connected:
            self._client.options["allow_reconnect"] = False  # makes connect() raise
        if self._on_error is not None:
            await self._on_error(error)

    def lacks_permission(self, what: Literal["publish", "subscription"]) -> bool:
        """Return whether the server has refused something that this login may not do."""
        return any(f"permissions violation for {what}" in str(failure).lower() for failure in self.failures)


def is_refusal(error: Exception) -> bool:
    """Return whether trying again is of no use: the server refuses us, or we refuse the server."""
    return _is_unauthorized(error) or isinstance(error, ClearTextError | ssl.SSLError)


def _is_reported_elsewhere(error: Exception) -> bool:
    """Return whether it is a missing permission to make or read a stream: the caller that needs it says the remedy."""
    text = str(error).lower()
    return any(
        f'permissions violation for publish to "$js.api.stream.{call}.' in text for call in ("create", "msg.get")
    )


def _is_unauthorized(error: Exception) -> bool:
    return isinstance(error, AuthorizationError) or "authorization violation" in str(error).lower()


def failure_message(url: str, failures: list[Exception], timeout_s: float) -> str:
    """Return why no connection was made within the time, and what to do."""
    place = place_of(url)
    if any(map(_is_unauthorized, failures)):
        return (
            f"NATS at {place} refuses the user or password: check HEADRACE_NATS_USER and HEADRACE_NATS_PASSWORD, or "
            "HEADRACE_NATS_CREDS_FILE or HEADRACE_NATS_NKEY_SEED_FILE."
        )
    for failure in failures:
        if isinstance(failure, ClearTextError):
            return f"NATS at {place} does not offer TLS, which tls:// requires; nothing was sent to it."
        if isinstance(failure, ssl.SSLCertVerificationError) and failure.verify_code in _NOT_VALID_NOW:
            why = f"NATS at {place} is not trusted ({failure.verify_message})"
            return f"{why}: renew its certificate, or set this machine's clock."
        if isinstance(failure, ssl.SSLCertVerificationError):
            return f"NATS at {place} is not trusted ({failure.verify_message}): check HEADRACE_NATS_CA_FILE."
        if isinstance(failure, ssl.SSLError):
            return f"NATS at {place} ends the TLS handshake ({failure.reason}): check HEADRACE_NATS_CERT_FILE."
    reason = f" ({_reason(failures[-1])})" if failures else ""
    return f"NATS at {place} did not answer within {timeout_s:g} s{reason}: start it, or check HEADRACE_NATS_URL."


def wrong_login(url: str, role: str, lacks: str, user: str | None) -> str:
    """Return what to do about a login that may not do something that its role must."""
    told = f"NATS at {place_of(url)} lets this login in, but not do what the role {role} does (it may not {lacks})"
    served = served_by(user) if role == "worker" else None
    if served is None:
        same = ", or one with the same permissions"
        if role == "worker":
            same = ", or with a login of `headrace worker-login` for this model and worker"
        return (
            f"{told}: log in as the user `{role}` of ops/nats/headrace.conf{same}; check HEADRACE_NATS_USER and "
            "HEADRACE_NATS_URL."
        )
    model, worker = served
    if lacks.startswith("listen"):
        return (
            f"{told}: this login is for the model {model!r}: start with --served-model-name {model}, or make one for "
            "the model that is served (`headrace worker-login`)."
        )
    start = "make one with `headrace worker-login`" if worker is None else f"start with --worker-id {worker}"
    return f"{told}: this login is for the worker {worker!r}: {start}."


def place_of(url: str) -> str:
    """Return the hosts and ports of a URL, without logins."""
    return ", ".join(part.rpartition("@")[2].rpartition("//")[2] for part in url.split(","))


def _reason(failure: Exception) -> str:
    """Return a failure in words; of the operating system's, which carry Python's own, the number's alone."""
    if isinstance(failure, OSError) and failure.errno is not None:
        return os.strerror(failure.errno) if failure.errno > 0 else str(failure.strerror)
    return str(failure) or type(failure).__name__


Role = Literal["gateway", "worker", "batch", "admin"]
AsyncCallback = Callable[[], Awaitable[None]]

MINIMUM_SERVER_VERSION = (2, 12, 12)

# A dead server is noticed after two pings of two seconds. The client accepts fractions where it documents integers.
_OPTIONS: dict[str, Any] = {
    "ping_interval": 2,
    "max_outstanding_pings": 2,
    "max_reconnect_attempts": -1,
    "reconnect_time_wait": 0.1,
    "pending_size": 8 << 20,
}

# What publishing raises while a connection is away: the client's own errors, and those of the socket under it.
SEND_ERRORS: tuple[type[Exception], ...] = (NatsError, OSError)

_log = logging.getLogger(__name__)


async def unsubscribe(subscription: Subscription | None) -> None:
    """End a subscription, if there is one; a connection that is away has ended it already."""
    if subscription is not None:
        with contextlib.suppress(*SEND_ERRORS):
            await subscription.unsubscribe()


_NO_FILES = NatsFiles()


def inbox_prefix(role: Role, scope: str | None = None) -> str:
    """Return what all inboxes of a role begin with, e.g. `_INBOX_worker`: permissions are written in terms of it.

    Within a role, a `scope` such as a model keeps inboxes apart for logins that are for it alone; it is one token.
    """
    return f"_INBOX_{role}" if scope is None else f"_INBOX_{role}.{scope}"


class NatsRefusedError(DependencyError):
    """Trying again is of no use: NATS refuses us, or we refuse it."""


class WrongRoleError(NatsRefusedError):
    """NATS lets us in, and this login may not do what our role does."""


async def connect(
    url: str,
    *,
    role: Role,
    name: str,
    scope: str | None = None,
    speaks_on: str | None = None,
    user: str | None = None,
    password: str | None = None,
    files: NatsFiles = _NO_FILES,
    on_error: ErrorCallback | None = None,
    on_disconnect: AsyncCallback | None = None,
    on_reconnect: AsyncCallback | None = None,
    on_close: AsyncCallback | None = None,
    timeout_s: float = 10.0,
) -> DirectClient:
    """Connect to NATS and check the server's version.

    Args:
        url: One server, or several separated by commas.
        role: Whose account this is; sets the inbox prefix.
        name: Shown in the server's monitoring.
        scope: The part of the role that this is, as one token of a subject: a worker's model.
        speaks_on: A subject that this login must be allowed to publish to; an empty message is sent there.
        user: Account user, unless the URL has one.
        password: Its password.
        files: Credentials, which win over user and password, and certificates.
        on_error: Called with errors outside of calls, such as a slow subscription that lost messages; None logs them.
        on_disconnect: Called when the connection is lost; published messages are buffered from then on.
        on_reconnect: Called when it is back and all subscriptions are restored.
        on_close: Called when the server has closed the connection for good, because of a limit, say, or a login that is
            no longer accepted: it does not come back, and the process must end. Not when we close it.
        timeout_s: How long the server may take to appear; once connected, reconnecting never ends.

    Raises:
        ConfigError: The URL is none of NATS, or one of the files cannot be used.
        WrongRoleError: The login is that of another role.
        DependencyError: The server does not appear, refuses us, speaks clear text where TLS is required, has a
            certificate that is not trusted, or is too old.
    """
    check_url(url)
    identity = identity_options(files) or _login(url, user, password)
    is_tls = is_tls_required(url, files)
    tls: dict[str, Any] = {"tls": tls_context(files)} if is_tls else {}
    client = TlsClient() if is_tls else NatsClient()
    errors = ConnectionErrors(client, on_error)

    async def closed() -> None:
        if on_close is not None and not client.is_ended:
            _log.error("NATS has closed the connection for good: %s", client.last_error)
            await on_close()

    try:
        async with asyncio.timeout(timeout_s):
            connecting = client.connect(
                servers=[part.strip() for part in url.split(",")],
                name=name,
                error_cb=errors.report,
                disconnected_cb=_coroutine_function(on_disconnect),
                reconnected_cb=_coroutine_function(on_reconnect),
                closed_cb=closed,
                inbox_prefix=inbox_prefix(role, scope),
                **identity,
                **tls,
                **_OPTIONS,
            )
            await _cancellable(connecting)
            if lacks := await _lacking(client, errors, speaks_on):
                raise WrongRoleError(wrong_login(url, role, lacks, identity.get("user")))
    except (TimeoutError, OSError, NatsError):
        await close(client)
        kind = NatsRefusedError if any(map(is_refusal, errors.failures)) else DependencyError
        raise kind(failure_message(url, errors.failures, timeout_s)) from None
    except (asyncio.CancelledError, WrongRoleError):
        # An abandoned client would stay connected, and reconnect for ever.
        await close(client)
        raise
    errors.was_connected = True
    await _check_version(client)
    return client


async def _cancellable(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work, and end it when we are cancelled, however often it takes, and however often we are.

    Before Python 3.12 `asyncio.wait_for`, with which the client connects, loses a cancellation that comes in the moment
    in which a server refuses the connection: Ctrl-C did nothing.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    finally:
        while not task.done():
            task.cancel()
            # The first cancellation goes on from here in any case.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=0.1)
    await task


def _login(url: str, user: str | None, password: str | None) -> dict[str, str | None]:
    if user is None and (login := login_in(url)) is not None:
        user, password = login
    return {"user": user, "password": password}


def has_jetstream(client: Client) -> bool:
    """Return whether the server that a client is connected to runs JetStream."""
    return bool(client._server_info.get("jetstream", False))


def is_clustered(client: Client) -> bool:
    """Return whether the server that a client is connected to has others beside it."""
    return bool(client._server_info.get("cluster"))


def _coroutine_function(callback: AsyncCallback | None) -> AsyncCallback | None:
    """Wrap a callback so that the client, which asks for a function defined with `async def`, accepts it."""
    if callback is None:
        return None

    async def call() -> None:
        await callback()

    return call


async def _lacking(client: Client, errors: ConnectionErrors, speaks_on: str | None) -> str | None:
    """Return what this login may not do of what its role must; None if it may.

    Without the inboxes of its role, where the answers to its requests arrive, it would wait for every answer for ever.
    """
    errors.is_checking = True
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    if speaks_on is not None:
        await client.publish(speaks_on, b"")
    # NATS answers in order: a refusal comes before the answer to this.
    await client.flush()
    errors.is_checking = False
    if errors.lacks_permission("subscription"):
        return f"listen to {inbox.rpartition('.')[0]}.>"
    await subscription.unsubscribe()
    return f"publish to {speaks_on}" if errors.lacks_permission("publish") else None


async def _check_version(client: Client) -> None:
    version = client.connected_server_version
    found = (version.major, version.minor, version.patch)
    if found < MINIMUM_SERVER_VERSION:
        await close(client)
        needed = ".".join(map(str, MINIMUM_SERVER_VERSION))
        raise NatsRefusedError(f"nats-server {'.'.join(map(str, found))} is too old: {needed} or newer is needed.")


async def close(client: Client) -> None:
    """Close a connection completely, however often we are cancelled meanwhile, or its socket would leak."""
    closing = asyncio.ensure_future(client.close())
    is_cancelled = False
    while not closing.done():
        try:
            await asyncio.wait({closing})
        except asyncio.CancelledError:
            is_cancelled = True
    with contextlib.suppress(Exception):
        closing.result()
    if is_cancelled:
        raise asyncio.CancelledError
