"""How much of the host's memory is free, within this process's control group and its own limit (`ulimit -v`)."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def free_host_bytes() -> int:
    """Return how much memory is free, within this process's control group and its own limit."""
    return min(_machine_free_bytes(), control_group_free_bytes(_CONTROL_GROUP), address_space_free_bytes())


def address_space_free_bytes() -> int:
    """Return what this process may still map by its limit of addresses, which `ulimit -v` sets."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        num_pages = 0
    return max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE"))


def control_group_free_bytes(group: Path) -> int:
    """Return what a control group has left; files that it has read lately count as free, as the kernel drops them."""
    try:
        limit, current = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - int(current) + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return _UNLIMITED


def _machine_free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
