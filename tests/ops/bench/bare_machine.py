"""Run Python as on a machine that lacks some packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
"""


def run_without(blocked: Sequence[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own in which the packages `blocked` cannot be imported; it may use `sys`."""
    program = _BLOCK.format(blocked=tuple(blocked)) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)


def all_modules_but(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the modules of all installed packages but these and what they need, and but our own."""
    there: set[str] = set()
    left = list(packages)
    while left:
        name = _normalised(left.pop())
        if name not in there:
            there.add(name)
            try:
                needed = requires(name) or []
            except PackageNotFoundError:
                continue
            left += [re.split(r"[^\w.-]", need)[0] for need in needed if "extra ==" not in need]
    modules = packages_distributions().items()
    absent = [module for module, owners in modules if there.isdisjoint(map(_normalised, owners))]
    return tuple(sorted(module for module in absent if not list(ROOT.glob(f"{module}*"))))


def python_without(blocked: Sequence[str], directory: Path) -> dict[str, str]:
    """Return an environment whose `python3` is this one, without the modules `blocked`; `directory` keeps its files."""
    (directory / "sitecustomize.py").write_text(_BLOCK.format(blocked=tuple(blocked)))
    command = directory / "python3"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(directory)}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
