"""`make chaos`: run scenarios one after the other, print one table, and record each row."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import uvloop

from ops.bench.record import append_record
from ops.chaos.outcome import NotPossibleHereError, Outcome, table
from ops.chaos.scenarios import SCENARIOS, of_ci


def main(arguments: list[str]) -> int:
    """Run what the command line asks for; the exit status is 1 when a promise was broken."""
    options = _parser().parse_args(arguments)
    # The observer's connection fails with NATS, as it should; what matters is in the outcome.
    logging.getLogger("shared.nats_connection").setLevel(logging.CRITICAL)
    chosen = of_ci(options.turn) if options.quick else dict.fromkeys(options.scenarios or SCENARIOS)
    outcomes: list[Outcome] = []
    for name, number in chosen.items():
        began = time.monotonic()
        try:
            outcome = uvloop.run(SCENARIOS[name](options.requests or number))
        except NotPossibleHereError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
            continue
        outcome.figures["took s"] = round(time.monotonic() - began, 1)
        outcomes.append(outcome)
        print(table([outcome]), file=sys.stderr, flush=True)
        if not options.no_record:
            append_record("chaos", f"make chaos ARGS={' '.join(arguments)!r}", outcome.record())
    print(f"\n{table(outcomes)}")
    return 0 if all(outcome.is_kept for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", choices=[*SCENARIOS, []], help=f"Of: {', '.join(SCENARIOS)}."
    )
    parser.add_argument("--quick", action="store_true", help="Only the scenarios of CI: about three minutes.")
    parser.add_argument(
        "--turn", type=int, default=0, metavar="K", help="Which of the others --quick runs beside them."
    )
    parser.add_argument("--requests", type=int, metavar="N", help="How many requests, where a scenario counts them.")
    parser.add_argument("--no-record", action="store_true", help="Do not append to ops/bench/results/chaos.jsonl.")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
