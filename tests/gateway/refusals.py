"""The error with which a call refuses what a client sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import pytest

from gateway.errors import ApiError

P = ParamSpec("P")


def refused(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> ApiError:
    """Call, and give back the error, which is a 400."""
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value
