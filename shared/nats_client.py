"""A NATS client that speaks TLS or not at all.

The library's own client takes `tls://` as a preference: a server that does not ask for TLS, or an attacker who removes
that from its greeting, gets the password and every message in clear text. And a handshake that fails leaves a
connection behind that can neither be closed nor kept from being written to.
"""

from __future__ import annotations

from typing import Any

from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError

from shared.direct_client import DirectClient


class ClearTextError(NatsError):
    """A server offers clear text where TLS is required."""

    def __str__(self) -> str:
        return "the server does not offer TLS"


class NatsClient(DirectClient):
    """A client that gives a connection up where it cannot be begun; a server may ask any client for a handshake."""

    is_ended = False
    """We have closed it, or are about to: it was not the server."""

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException:
            # Published messages wait for a connection, and `close` would write them to this one.
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
            self._transport = _NoTransport()  # type: ignore[no-untyped-call]
            raise

    async def close(self) -> None:
        """Close the connection; what waits for one that is lost is dropped.

        The library would write it to the lost connection, which uvloop refuses with a RuntimeError.
        """
        self.is_ended = True
        if not self.is_connected:
            self._pending = []
            self._pending_data_size = 0
        await super().close()


class TlsClient(NatsClient):
    """A client that sends nothing but a TLS handshake until one has succeeded, at each connection."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Called with what a server says of itself before anything is sent to it.
        if initial_connection and not info.get("tls_required"):
            raise ClearTextError
        await super()._process_info(info, initial_connection)


class _NoTransport(TcpTransport):
    """Takes the place of an abandoned connection and drops all writes. The next attempt replaces it."""

    def write(self, payload: bytes) -> None:
        """Drop it."""

    def writelines(self, payload: list[bytes]) -> None:
        """Drop them."""

    async def drain(self) -> None:
        """Nothing waits."""
