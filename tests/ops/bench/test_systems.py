"""What a benchmark starts ends with it, whatever ends the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.systems import descendants
from tests.servers import is_alive
from tests.waiting import wait_for

BENCH = """
import os, pathlib, sys, time
from ops.bench.systems import headrace_up
from tests.servers import is_alive
environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
with headrace_up(["--simulate", "1"], environ):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
"""
TIMEOUT_S = 60


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell a process nothing of its parent's end")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_ended_bench_leaves_no_process(ending: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([sys.executable, "-c", BENCH, str(ready)], env=environ)
    try:
        wait_for(lambda: ready.exists() or bench.poll() is not None, TIMEOUT_S)
        started = [pid for pid in descendants([bench.pid]) if pid != bench.pid]
        # The supervisor, NATS, a gateway and a worker at least.
        assert len(started) >= 4

        bench.send_signal(ending)
        status = bench.wait(TIMEOUT_S)

        wait_for(lambda: not any(map(is_alive, started)), TIMEOUT_S)
        if ending is signal.SIGTERM:
            assert status == 128 + signal.SIGTERM
            assert list(tmp_path.iterdir()) == [ready]
    finally:
        bench.kill()
        bench.wait()
