"""Which interface of this host has an address."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address; empty where the system does not tell."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""
