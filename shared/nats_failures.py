"""Why NATS cannot be reached or refuses us: the errors of a connection, and the messages that say what to do."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Literal

from nats.aio.client import Client
from nats.errors import AuthorizationError

from shared.nats_client import ClearTextError
from shared.subjects import served_by

ErrorCallback = Callable[[Exception], Awaitable[None]]

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_VALID_NOW = (9, 10)
_MAX_KEPT = 10

_log = logging.getLogger(__name__)


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
