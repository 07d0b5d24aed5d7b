"""The listening sockets of a gateway: one for the public port, and one for the operator's if there is one.

Several processes accept from the same two sockets, which their parent has bound before it forked them. So a process
that stands still or ends takes no connection with it that it has not accepted: the others accept it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from gateway.config import GatewayConfig
from shared.errors import ConfigError

BACKLOG = 2048

_FREE_PORT_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets; who serves first makes them listen. `operator` is None where no operator's port is asked for."""

    public: socket.socket
    operator: socket.socket | None

    @property
    def sockets(self) -> list[socket.socket]:
        """All of them, the public one first."""
        return [self.public] if self.operator is None else [self.public, self.operator]

    def listen(self) -> None:
        """Accept connections into the queue; whoever holds a share takes them from there."""
        for listener in self.sockets:
            listener.listen(BACKLOG)

    def refuse(self) -> None:
        """Stop listening without closing: clients are refused, also those that nobody has accepted yet."""
        for listener in self.sockets:
            listener.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this process's share; listening ends when no process holds one any more."""
        for listener in self.sockets:
            listener.close()


def bind_listeners(config: GatewayConfig) -> Listeners:
    """Bind the ports.

    Raises:
        ConfigError: A port cannot be used.
    """
    public = _bind("HEADRACE_PORT", config.host, config.port)
    operator = None
    if config.operator_port is not None:
        operator = _bind("HEADRACE_OPERATOR_PORT", config.operator_host, config.operator_port)
    return Listeners(public, operator)


def url_of(listener: socket.socket) -> str:
    """Return the URL at which a socket of this machine is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(variable: str, host: str, port: int) -> socket.socket:
    for attempt in range(_FREE_PORT_ATTEMPTS):
        try:
            return _bind_socket(host, port or _free_port(host))
        except OSError as error:
            if port or attempt == _FREE_PORT_ATTEMPTS - 1:
                raise ConfigError(variable, f"{host}:{port} cannot be used: {error.strerror}") from None
    raise AssertionError("unreachable")


def _free_port(host: str) -> int:
    """Choose a port. A socket that is bound to port 0 itself would get another one when it listens again."""
    with _bind_socket(host, 0) as probe:
        return int(probe.getsockname()[1])


def _bind_socket(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
