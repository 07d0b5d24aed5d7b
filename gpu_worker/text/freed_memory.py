"""Gives memory back that a long text has taken while it was encoded."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Give free pages back to the system, wherever they lie; C libraries other than glibc are left alone.

    The tokenizers library makes a string of each token: a text of 4 MB takes half a gigabyte of small blocks. Once they
    are free, glibc keeps them, since it gives back the end of a heap alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
