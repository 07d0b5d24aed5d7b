"""Whether the packages of a part of Headrace are installed."""

from __future__ import annotations

import importlib.util

from shared.errors import DependencyError


def require(extra: str, *packages: str) -> None:
    """Check that the packages of an extra are there, without importing them.

    Raises:
        DependencyError: Some are missing; the message says how to install them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyError(f"{', '.join(missing)} not installed: `pip install 'headrace[{extra}]'`.")
