"""One run of the bench: a process a suite, each with a time limit, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from ops.bench.gpu.prepared_process import JobFailedError, Json, prepared_processes
from ops.bench.gpu.results import append_failure

_MODULE = "ops.bench.gpu.run"
# A suite starts nothing after its limit; what it has started by then may take this long before its process is killed.
GRACE_S = 30.0


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


def run_suites(suites: Sequence[str], told: Json, limit_s: float, suite_limit_s: float) -> Verdicts:
    """Measure the ceilings, then run suite after suite; a process that dies or hangs costs its own suite only.

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
    jobs: list[str | None] = [*([] if told["checks_only"] else [None]), *suites]
    ceilings: Json | None = None
    # As the processes tell. This one only starts the others and does not open the device, which may hang.
    machine: Json = {"device": "unknown"}
    with closing(prepared_processes(_MODULE, len(jobs))) as processes:
        for suite, process in zip(jobs, processes, strict=True):
            left_s = min(deadline - time.monotonic(), suite_limit_s)
            if suite is not None and left_s <= 0:
                verdicts.late = list(suites[suites.index(suite) :])
                break
            job = told | {"suite": suite, "limit_s": left_s, "ceilings": ceilings}
            try:
                answer = process.run(job, left_s + GRACE_S)
            except JobFailedError as error:
                if suite is None:
                    print(f"ceilings: {error}; each suite measures its own", flush=True)
                else:
                    verdicts.failed[suite] = str(error)
                    append_failure(told, machine, suite, str(error))
                    print(f"FAILED {suite}: {error}", flush=True)
                continue
            machine = answer["machine"]
            if suite is None:
                ceilings = answer["ceilings"]
            elif not answer["is_right"]:
                verdicts.wrong.append(suite)
    return verdicts
