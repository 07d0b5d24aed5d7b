from __future__ import annotations

import pytest

from shared.errors import HeadraceError
from shared.rust_panics import panics_as


def test_panic_is_an_error_of_the_callers_choice() -> None:
    class PanicException(BaseException):
        """As PyO3 names and derives it."""

    with pytest.raises(HeadraceError, match="out of bounds"), panics_as(HeadraceError):
        raise PanicException("out of bounds")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_everything_else_is_left_alone(kind: type[BaseException]) -> None:
    with pytest.raises(kind), panics_as(HeadraceError):
        raise kind
