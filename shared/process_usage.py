"""Memory of this process, for metrics."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory that the process has in RAM; where the system cannot tell, the most that it had."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
