"""`make bench`: start the system with a simulated engine, load it, print one table, record each row, stop it.

The engine makes one token per running sequence every `--step-ms`, so what is measured is the gateway, the queue and the
worker's consumer. `python -m ops.bench.gateway --ready-file FILE` loads a system that runs already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from ops.bench import gateway
from ops.bench.load.processes import StartError
from ops.bench.load.systems import headrace_up


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step-ms", default="10", help="Pace of the simulated engine.")
    parser.add_argument("--concurrency", default="1,16,64,256", help="Connections, separated by commas.")
    parser.add_argument("--tokens", default="128", help="Tokens per request.")
    parser.add_argument("--gateways", default="1", help="Gateway processes.")
    options = parser.parse_args()
    # Steps of one length at any load: what varies is the gateway's, and the floor server's steps do not grow.
    environ = os.environ | {"HEADRACE_SIMULATE_GROWTH": "0"}
    arguments = ["--step-ms", options.step_ms, "--concurrency", options.concurrency, "--tokens", options.tokens]
    try:
        with (
            headrace_up(["--simulate", options.step_ms, "--gateways", options.gateways], environ) as info,
            tempfile.NamedTemporaryFile("w", suffix=".json") as ready,
        ):
            json.dump(info, ready)
            ready.flush()
            gateway.main([*arguments, "--ready-file", ready.name])
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
