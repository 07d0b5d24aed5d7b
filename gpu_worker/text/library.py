"""What the tokenizers library raises, as an error of ours: it raises plain exceptions, and panics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import HeadraceError
from shared.rust_panics import panics_as


class TokenizerError(HeadraceError):
    """The model's tokenizer cannot do with a text, or at all; its files are wrong."""

    def __init__(self, reason: str) -> None:
        """Say why, in the library's words."""
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
