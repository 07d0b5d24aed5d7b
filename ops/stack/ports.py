"""Ports on loopback: find a free one, and say who holds a taken one."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path

from shared.errors import ConfigError

# Below the range from which the kernel takes ports for outgoing connections. In that range a client that reconnects to
# a stopped server can be given the server's own port, connect to itself, and so keep the server from coming back.
_FREE_PORTS = range(10_000, 30_000)
_ATTEMPTS = 200


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(count: int = 1, taken: Collection[int] = ()) -> int:
    """Return the first of `count` ports in a row on which no process listens and that are not in `taken`.

    Raises:
        ConfigError: None was found.
    """
    for _ in range(_ATTEMPTS):
        port = random.choice(_FREE_PORTS)
        if all(each not in taken and is_free(each) for each in range(port, port + count)):
            return port
    raise ConfigError("HEADRACE_PORT", f"no free port found among {_FREE_PORTS.start}-{_FREE_PORTS.stop - 1}")


def claim_port(port: int, variable: str = "HEADRACE_PORT", taken: Collection[int] = ()) -> int:
    """Return the port, or a free one for 0 that is not among those `taken`; errors name its `variable`.

    Raises:
        ConfigError: The port is taken; the message names the holder where that can be known, and a free port.
    """
    if port == 0:
        return free_port(taken=taken)
    if is_free(port):
        return port
    offer = next((other for other in range(port + 1, min(port + 100, 65536)) if is_free(other)), None) or free_port()
    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    raise ConfigError(variable, f"port {port} is taken{by}; try {offer}, which is free")


def port_holder(port: int) -> str | None:
    """Return name and pid of the process that listens on the port, where Linux lets us see it."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            # It ended meanwhile, or belongs to another user.
            continue
    return None


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in map(str.split, lines):
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.append(fields[9])
    return inodes
