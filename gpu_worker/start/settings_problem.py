"""How the process that checks a worker's settings tells what is wrong, without what the check itself imports."""

from __future__ import annotations

import msgspec

EXIT_BAD_SETTINGS = 2


class SettingsProblem(msgspec.Struct):
    """What is wrong, and the variable of the setting that is, where one is known."""

    problem: str
    variable: str | None = None
