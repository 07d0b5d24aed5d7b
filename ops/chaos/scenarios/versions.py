"""Processes of an earlier version beside today's: what a rolling update meets, in both directions.

An earlier version is the source of a commit, which runs in this environment. A change of the wire adds the commit
before it here, as long as fleets may run it.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from ops.chaos import disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Kill
from ops.chaos.mix import mixed_bodies
from ops.chaos.outcome import NotPossibleHereError, Outcome
from ops.chaos.system import SystemOptions

# Before workers had the queue `resumed`.
EARLIER = "cb7d635ac746dfb6d4931f8d3babaa9f7d6fb507"
_ROOMS = ("gateway", "gpu_worker", "shared", "kernels", "ops")
_SOURCE = Path(__file__).parents[3]


EARLIER_PARTS = {
    "earlier-workers": ("worker-0", "worker-1"),
    "earlier-gateway": ("gateway-0",),
    "mixed-workers": ("worker-0",),
}
"""The parts of each scenario that are of the earlier version."""


async def worker_deaths(name: str, num_requests: int | None) -> Outcome:
    """SIGKILL of two workers in turn while some parts are of an earlier version."""
    with tempfile.TemporaryDirectory(prefix="headrace-earlier-") as directory:
        unpack(EARLIER, Path(directory))
        return await disturbance.run(
            Disturbance(
                name,
                "0 failed",
                SystemOptions(num_workers=2, source_of=dict.fromkeys(EARLIER_PARTS[name], Path(directory))),
                mixed_bodies(60, 8),
                lambda n: [Kill(1.0, 0.5, f"worker-{n % 2}")],
                concurrency=12,
                num_requests=num_requests or 300,
            )
        )


def unpack(commit: str, directory: Path) -> None:
    """Write the source of a commit to a directory."""
    packing = subprocess.run(["git", "-C", _SOURCE, "archive", commit, *_ROOMS], capture_output=True, check=False)
    if packing.returncode:
        raise NotPossibleHereError(f"the history has no commit {commit[:8]}: {packing.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", directory], input=packing.stdout, check=True)
