"""`make bench`: start the system with a simulated engine, load it, print one table, record each row, stop it.

The engine makes one token per running sequence every `--step-ms`, so what is measured is the gateway, the queue and the
worker's consumer. `python -m ops.bench.gateway --ready-file FILE` loads a system that runs already.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step-ms", default="10", help="Pace of the simulated engine.")
    parser.add_argument("--concurrency", default="1,16,64,256", help="Connections, separated by commas.")
    parser.add_argument("--tokens", default="128", help="Tokens per request.")
    parser.add_argument("--gateways", default="1", help="Gateway processes.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        directory = Path(name)
        ready = directory / "ready.json"
        command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--state-dir", str(directory / "state")]
        command += ["--simulate", options.step_ms, "--gateways", options.gateways, "--ready-file", str(ready)]
        with (directory / "up.log").open("wb") as log:
            # Steps of one length at any load: what varies is the gateway's, and the floor server's steps do not grow.
            environ = os.environ | {"HEADRACE_SIMULATE_GROWTH": "0"}
            system = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
        try:
            if not _is_ready(system, ready):
                print((directory / "up.log").read_text(), file=sys.stderr)
                return 1
            return _load(ready, options)
        finally:
            _stop(system)


def _is_ready(system: subprocess.Popen[bytes], ready: Path) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if system.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _load(ready: Path, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "ops.bench.gateway", "--ready-file", str(ready), "--step-ms", options.step_ms]
    command += ["--concurrency", options.concurrency, "--tokens", options.tokens]
    return subprocess.run(command, check=False).returncode


def _stop(system: subprocess.Popen[bytes]) -> None:
    if system.poll() is None:
        system.send_signal(signal.SIGINT)
        try:
            system.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            system.kill()
            system.wait()


if __name__ == "__main__":
    sys.exit(main())
