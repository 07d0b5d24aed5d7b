"""Operating-system limits of a gateway process: enough open files, and freed memory that is returned."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource

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
