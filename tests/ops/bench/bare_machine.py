"""Run Python as on a machine that lacks some packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

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
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
