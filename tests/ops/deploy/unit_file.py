"""systemd units as systemd reads them, as far as ours go: what they run, with which variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT

UNITS = ROOT / "ops" / "deploy" / "systemd"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's settings, in order; a name may occur several times."""

    settings: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.settings if key == name]

    def environ(self, etc: Path) -> dict[str, str]:
        """Return the variables that its process gets, from itself and its files, which are in `etc` here."""
        pairs = [pair for line in self.all("Environment") for pair in shlex.split(line)]
        for file in self.all("EnvironmentFile"):
            lines = (etc / Path(file).relative_to("/etc/headrace")).read_text().splitlines()
            pairs += [line for line in lines if line and not line.startswith("#")]
        return dict(pair.split("=", 1) for pair in pairs)

    def command(self, name: str, environ: Mapping[str, str]) -> list[str]:
        """Return the command of `ExecStart` or the like, its variables filled in."""
        (line,) = self.all(name)
        return [re.sub(r"\$\{(\w+)\}", lambda found: environ[found[1]], word) for word in shlex.split(line)]


def read_unit(name: str, instance: str = "") -> Unit:
    lines = (UNITS / name).read_text().replace("%i", instance).splitlines()
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    return Unit(tuple((key.strip(), value.strip()) for key, _, value in pairs))
