"""The message in which the process that checks settings reports a problem, without the imports of the check."""

from __future__ import annotations

import msgspec

EXIT_BAD_SETTINGS = 2


class SettingsProblem(msgspec.Struct):
    """The problem, and the variable of the wrong setting, where one is known."""

    problem: str
    variable: str | None = None
