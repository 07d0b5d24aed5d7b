"""Panics of libraries that are written in Rust, as errors.

What such a library does not expect ends in a panic. Python sees it as an exception that is no `Exception`: what looks
after one request would not catch it, and the process would end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# PyO3 makes the class, and no library exports it.
_NAME = "PanicException"


@contextmanager
def panics_as(kind: Callable[[str], Exception]) -> Iterator[None]:
    """Where the block panics, raise what `kind` makes of the panic's message."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _NAME:
            raise
        raise kind(str(error)) from None
