"""One run of the bench: a process a suite, each with a time limit, and what became of them.

A crash, a hang or a CUDA error that never clears ends with its process and costs no other suite.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.bench.gpu.results import append_failure
from ops.stack.tether import tethered

Json = dict[str, Any]
# Exit code of a suite that came to its end and was wrong.
WRONG = 3
# A suite starts nothing after its limit; what it has started by then may take this long before its process is killed.
GRACE_S = 30.0
_MODULE = "ops.bench.gpu.run"


class JobFailedError(RuntimeError):
    """A process ended before its job did; the message says how."""


@dataclass(slots=True)
class Verdicts:
    """What became of the suites."""

    wrong: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return True where every suite that was run came to its end, and was right."""
        return not self.wrong and not self.failed

    def __str__(self) -> str:
        parts = [f"wrong: {', '.join(self.wrong)}" if self.wrong else "no op was wrong"]
        parts += [f"{name} did not finish ({reason})" for name, reason in self.failed.items()]
        parts += [f"no time was left for: {', '.join(self.late)}"] if self.late else []
        return "; ".join(parts)


def run_apart(arguments: Sequence[str], limit_s: float, ends: Sequence[int] = (0,)) -> int:
    """Run `python -m` with these arguments in a process of its own; return its exit code, one of `ends`.

    Raises:
        JobFailedError: It ended otherwise, or was killed after `limit_s`.
    """
    command = tethered([sys.executable, "-m", *arguments])
    try:
        code = subprocess.run(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, timeout=limit_s).returncode
    except subprocess.TimeoutExpired as error:
        raise JobFailedError(f"killed: it ran longer than {limit_s:.0f} s") from error
    if code < 0:
        raise JobFailedError(f"its process was ended by {signal.Signals(-code).name}")
    if code not in ends:
        raise JobFailedError(f"its process ended with exit code {code}")
    return code


def run_suites(suites: Sequence[str], told: Json, limit_s: float, suite_limit_s: float) -> Verdicts:
    """Run suite after suite.

    Args:
        suites: Names, in their order.
        told: What the process of every suite is told. `bench` is the module whose `all_suites()`, `device()` and
            `timer()` it calls, `directory` is where `gpu.jsonl` is appended to, `command` and `process` are recorded
            of the whole run. With `checks_only` nothing is timed, with `time_anyway` ops that are wrong are, too.
        limit_s: No suite starts later, and none goes on for longer than `GRACE_S` after it.
        suite_limit_s: Of one suite.
    """
    verdicts = Verdicts()
    deadline = time.monotonic() + limit_s
    for place, suite in enumerate(suites):
        left_s = min(deadline - time.monotonic(), suite_limit_s)
        if left_s <= 0:
            verdicts.late = list(suites[place:])
            break
        job = json.dumps(told | {"suite": suite, "limit_s": left_s})
        try:
            if run_apart([_MODULE, job], left_s + GRACE_S, (0, WRONG)) == WRONG:
                verdicts.wrong.append(suite)
        except JobFailedError as error:
            verdicts.failed[suite] = str(error)
            append_failure(Path(told["directory"]), told["command"], told["process"], suite, str(error))
            print(f"FAILED {suite}: {error}", flush=True)
    return verdicts
