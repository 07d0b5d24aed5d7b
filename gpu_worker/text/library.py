"""The tokenizers library: its plain exceptions and panics as an error of ours, and the memory that it leaves behind."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.errors import HeadraceError
from shared.rust_panics import panics_as


class TokenizerError(HeadraceError):
    """The model's tokenizer cannot do with a text, or at all; its files are wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model's tokenizer fails: {reason[:200]}")


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise a `TokenizerError` where the library fails in the block."""
    try:
        with panics_as(TokenizerError):
            yield
    except HeadraceError:
        raise
    except Exception as error:  # the library has no class of its own
        raise TokenizerError(str(error)) from None


def return_freed_memory() -> None:
    """Give free pages back to the system, wherever they lie; only with glibc, which frees the end of a heap alone.

    The tokenizers library makes a string of each token: a text of 4 MB takes half a gigabyte of small blocks.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
