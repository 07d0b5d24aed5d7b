"""What a gateway takes of the operating system: listening sockets, enough open files, and memory that it gives back.

It has one socket a process for the public port, and one for the operator's if there is one.
The parent binds all of them before it forks, and keeps them. The kernel spreads connections evenly over the sockets of
the public port, and each process has one of them as its own. A connection that its owner does not accept within a
moment, because it stands still, drains or is gone, is accepted by another process (`gateway.http1.server`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import resource
import socket
from dataclasses import dataclass

from gateway.config import GatewayConfig
from shared.errors import ConfigError

# Sockets of NATS and Redis, files, and the connections beyond the limit.
RESERVED_FILES = 128
# Blocks from this size on are mapped by themselves, and unmapped when they are freed.
MMAP_THRESHOLD_BYTES = 64 << 10

_M_MMAP_THRESHOLD = -3

_logger = logging.getLogger(__name__)


def affordable_connections(max_connections: int) -> int:
    """Raise the limit of open files as far as needed and allowed; return how many connections that is enough for."""
    needed = max_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    affordable = max(1, soft - RESERVED_FILES)
    _logger.warning(
        "fewer connections than configured: raise the limit of open files (ulimit -n)",
        extra={"max_connections": max_connections, "affordable": affordable, "open_files": soft},
    )
    return affordable


def return_freed_memory() -> None:
    """Keep glibc from raising its threshold for mapped blocks; other C libraries are left alone.

    After the first large block is freed, glibc takes blocks of that size from the heap, which shrinks only at its end:
    a wave of large bodies would stay in memory for ever.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


BACKLOG = 2048

_FREE_PORT_ATTEMPTS = 10
# No other port would do: the address is not this machine's.
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT)
_HOST_FORMS = "name one of this machine without scheme, brackets and port: 127.0.0.1, 0.0.0.0, ::"


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets; who serves first makes them listen. `operator` is None where no operator's port is asked for."""

    public: tuple[socket.socket, ...]
    operator: socket.socket | None
    scheme: str = "http"

    @property
    def sockets(self) -> list[socket.socket]:
        """All of them, the public ones first."""
        return [*self.public] if self.operator is None else [*self.public, self.operator]

    @property
    def url(self) -> str:
        """URL of the public port, on this machine."""
        return url_of(self.public[0], self.scheme)

    def listen(self) -> None:
        """Let the kernel queue connections; the processes that share a socket accept them."""
        for listener in self.sockets:
            listener.listen(BACKLOG)

    def refuse(self) -> None:
        """Stop listening without closing: clients are refused, also those that wait unaccepted."""
        for listener in self.sockets:
            listener.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this process's share; listening ends when no process holds one any more."""
        for listener in self.sockets:
            listener.close()


def bind_listeners(config: GatewayConfig) -> Listeners:
    """Bind the ports; `ConfigError` if one cannot be used."""
    public = _bind("HEADRACE_PORT", "HEADRACE_HOST", config.host, config.port, config.processes)
    operator = None
    if config.operator_port is not None:
        try:
            host, port = config.operator_host, config.operator_port
            [operator] = _bind("HEADRACE_OPERATOR_PORT", "HEADRACE_OPERATOR_HOST", host, port, 1)
        except ConfigError:
            Listeners(public, None).close()
            raise
    return Listeners(public, operator, "http" if config.tls_cert_file is None else "https")


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which a socket of this machine is reached."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind(variable: str, host_variable: str, host: str, port: int, count: int) -> tuple[socket.socket, ...]:
    for attempt in range(_FREE_PORT_ATTEMPTS):
        try:
            # A port that is shared can be bound by anyone of the same user: look first whether it is taken.
            with _bind_socket(host, port, is_shared=False) as probe:
                chosen = int(probe.getsockname()[1])
            return tuple(_bind_socket(host, chosen, is_shared=count > 1) for _ in range(count))
        except socket.gaierror:
            raise ConfigError(host_variable, f"{host!r} is not an address; {_HOST_FORMS}") from None
        except OSError as error:
            if error.errno in _NOT_OURS:
                problem = f"{host} is not an address that can be listened on here ({error.strerror}); {_HOST_FORMS}"
                raise ConfigError(host_variable, problem) from None
            if port or attempt == _FREE_PORT_ATTEMPTS - 1:
                raise ConfigError(variable, f"{host}:{port} cannot be used: {error.strerror}") from None
    raise AssertionError("unreachable")


def _bind_socket(host: str, port: int, *, is_shared: bool) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
