"""Host memory that other processes of this host and user read: a file of the kernel, which has no name.

A reader gets it over a Unix socket, whose name is in the kernel alone and stands for the address at which a worker
is found: only processes in the same network namespace of the same boot find it. So a name cannot mean another host's
memory, and a killed process leaves nothing to be swept.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import struct
from contextlib import ExitStack, suppress
from hashlib import sha256

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_CREDENTIALS = struct.Struct("3i")


def make_shared(num_bytes: int) -> tuple[int, npt.NDArray[np.uint8]] | None:
    """Return a file that others can only read, and its memory; None where the system has no such files."""
    try:
        file = os.memfd_create("headrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(file, num_bytes)
        memory = mmap.mmap(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)
    except OSError as error:
        os.close(file)
        _log.info("KV is not shared with other processes of this host: %s", error.strerror)
        return None
    return file, np.frombuffer(memory, dtype=np.uint8)


def listen(address: str, backlog: int) -> socket.socket | None:
    """Listen for processes of this host that look for a worker at an address; None where that is not possible."""
    with suppress(AttributeError, OSError), ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(_name(address))
        server.listen(backlog)
        stack.pop_all()
        return server
    return None


def connect(address: str, timeout_s: float) -> socket.socket | None:
    """Connect to the worker at an address, if it is a process of this host and user."""
    with suppress(AttributeError, OSError), ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(timeout_s)
        connection.connect(_name(address))
        if is_own_user(connection):
            stack.pop_all()
            return connection
    return None


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of this process's user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(packed)[1] == os.geteuid())


def _name(address: str) -> str:
    return "\0headrace-kv-" + sha256(address.encode()).hexdigest()
