"""Print what some extras of Headrace need of others, one requirement a line: `python requirements.py worker hub`.

Reads `pyproject.toml` in the working directory. The images install these before our own code, in a layer of their own.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN_EXTRAS = re.compile(r"headrace\[([^\]]+)\]")


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield the project's dependencies and those of these extras, and of the extras that they name."""
    yield from project["dependencies"]
    waiting, seen = list(extras), set(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop(0)]:
            own = _OWN_EXTRAS.fullmatch(requirement)
            if own is None:
                yield requirement
                continue
            named = [name.strip() for name in own[1].split(",")]
            waiting += [name for name in named if name not in seen]
            seen.update(named)


if __name__ == "__main__":
    found = requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], sys.argv[1:])
    print("\n".join(dict.fromkeys(found)))
