"""Stands for the process of a suite, without torch, so that it starts at once; the suite's name says how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from ops.bench.gpu.prepared_process import Json, serve_one_job

MACHINE = {"device": "a GPU"}


def run_job(job: Json) -> Json:
    """Measure the ceilings, or crash, hang, exit, or finish right or wrong, after a line of results."""
    if job["suite"] is None:
        return {"ceilings": {"bandwidth": 1.0, "read_bandwidth": 1.0, "matmul_rate": 1.0}, "machine": MACHINE}
    with Path(job["directory"], "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"op": job["suite"]}) + "\n")
    if job["suite"] == "crashing":
        os.kill(os.getpid(), signal.SIGSEGV)
    if job["suite"] == "hanging":
        time.sleep(600)
    if job["suite"] == "exiting":
        sys.exit(7)
    assert job["ceilings"] == {"bandwidth": 1.0, "read_bandwidth": 1.0, "matmul_rate": 1.0}
    return {"is_right": job["suite"] == "right", "machine": MACHINE}


if __name__ == "__main__":
    serve_one_job(run_job)
