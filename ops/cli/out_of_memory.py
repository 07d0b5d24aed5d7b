"""Tells errors that mean "no memory" from others: Python, torch and the system's loader have words of their own."""

from __future__ import annotations

import errno
import resource

# Of torch's allocator and of C++, and of the loader that maps a library.
_WORDS = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "failed to map segment", "out of memory")


def out_of_memory(error: BaseException) -> str | None:
    """Return one line for an error that comes of too little memory, naming the limit if there is one; else None."""
    if not any(_is_of_memory(each) for each in (error, error.__cause__)):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        limited = f"this process may map {limit >> 20} MiB (`ulimit -v`), and needs more"
        return f"out of memory: {limited}; PyTorch alone maps some gigabytes: raise the limit, or unset it"
    return "out of memory: end other processes, raise the limit of this container, or choose a smaller model or cache"


def _is_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, ImportError | OSError | RuntimeError) and any(word in str(error) for word in _WORDS)
