"""Shared by the benches of engines and servers: measuring in turn, rows with ratios to the best peer, options."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Protocol, TypeVar

from ops.bench.engine import Load, medians
from ops.bench.make_model import SHAPES, Shape, make_model
from ops.bench.peers.engines import PeerUnavailableError
from ops.bench.record import ResultTable, add_list, positive
from ops.bench.systems import StartError

OURS = "headrace"


class Figures(Protocol):
    """Result of an engine or server under a load: a dataclass whose fields `medians` understands."""

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all sequences together."""
        ...

    def others(self) -> dict[str, float]:
        """Return what else is printed and recorded, by its name there."""
        ...


Measured = TypeVar("Measured", bound=Figures)
Value = TypeVar("Value")
Rates = Mapping[tuple[str, int], float]


def in_turns(measures: Mapping[str, Callable[[], Value]], rounds: int) -> dict[str, list[Value]]:
    """Call each once a round, so that all share the machine's good and bad moments; return their results."""
    found = [{name: measure() for name, measure in measures.items()} for _ in range(rounds)]
    return {name: [each[name] for each in found] for name in measures}


def median_ratio(values: Iterable[float], bases: Iterable[float], digits: int = 3) -> float:
    """Return the median of the ratios of pairs."""
    return round(median(value / base for value, base in zip(values, bases, strict=True)), digits)


def measure_in_turn(
    engines: Mapping[str, Callable[[int], Mapping[int, Measured]]], rounds: int
) -> tuple[dict[tuple[str, int], Measured], dict[str, str]]:
    """Measure every engine, by name, in every round, so that they share the machine's good and bad moments.

    Returns the medians by name and batch size, and why engines are missing.
    """
    results: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    missing: dict[str, str] = {}
    for number in range(rounds):
        for name, measure in engines.items():
            if name in missing:
                continue
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                for batch, measured in measure(number).items():
                    results[name, batch].append(measured)
            except (PeerUnavailableError, StartError) as error:
                missing[name] = str(error)
    return {key: medians(values) for key, values in results.items() if key[0] not in missing}, missing


def ratios(rates: Rates) -> dict[int, float | None]:
    """Return our rate over that of the best peer, by batch size; None where either is missing."""
    result: dict[int, float | None] = {}
    for batch in sorted({batch for _, batch in rates}):
        peers = [rate for (name, other), rate in rates.items() if other == batch and name != OURS]
        ours = rates.get((OURS, batch))
        result[batch] = ours / max(peers) if ours and peers else None
    return result


def add_rows(
    table: ResultTable,
    results: Mapping[tuple[str, int], Measured],
    versions: Mapping[str, str | None],
    missing: Mapping[str, str],
    required: Iterable[str] = (OURS,),
    **common: object,
) -> None:
    """Print and record a row an engine and batch size, ours with the ratio to the best peer; then who is missing.

    Takes what `measure_in_turn` returns. Raises SystemExit where an engine of `required` is missing.
    """
    to_best = ratios({key: measured.decode_rate for key, measured in results.items()})
    for (name, batch), measured in results.items():
        ratio = to_best[batch] if name == OURS else None
        row = common | {"engine": name, "engine_version": versions.get(name), "batch": batch}
        row |= {"decode_tokens_per_s": round(measured.decode_rate, 1)} | measured.others()
        table.add(row | ({} if ratio is None else {"of_best_peer": round(ratio, 3)}), not_available=missing)
    for name, reason in missing.items():
        print(f"{name}: not available: {reason}")
    if absent := sorted(set(required) & set(missing)):
        raise SystemExit(f"not measured: {', '.join(absent)}")


def compare(
    table: ResultTable,
    engines: Mapping[str, Callable[[int], Mapping[int, Measured]]],
    options: argparse.Namespace,
    versions: Mapping[str, Callable[[], str | None]] | None = None,
    required: Iterable[str] = (OURS,),
    **common: object,
) -> None:
    """Measure engines in turn as the options of loads ask, and print and record the rows; `add_rows` says what."""
    results, missing = measure_in_turn(engines, options.rounds)
    told = {name: version() for name, version in (versions or {}).items() if name not in missing}
    add_rows(table, results, told, missing, required, prompt=options.prompt, new=options.new, **common)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much is asked of whom."""
    add_list(parser, "--batch", positive, [1, 4, 16, 32], "sequences at once: 1,4,16,32")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=positive, default=64, help="decode steps of all sequences together")
    parser.add_argument("--rounds", type=positive, default=3, help="the median over rounds is shown")
    parser.add_argument("--num-threads", type=positive, default=len(os.sched_getaffinity(0)), help="of every engine")
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where peers are installed."""
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "bench"
    parser.add_argument("--cache", type=Path, default=default_cache, help="where the peers are installed")


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which models are made."""
    add_list(parser, "--shapes", str, ["15m", "160m"], "models with random weights", list(SHAPES))


def loads_of(options: argparse.Namespace) -> list[Load]:
    """Return the loads that the options ask for, in order of batch size."""
    return [Load(batch, options.prompt, options.new) for batch in options.batch]


@contextmanager
def model_of(shape: Shape) -> Iterator[Path]:
    """Make a model of a shape, in a folder that is there until the block ends."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        make_model(shape, Path(folder))
        yield Path(folder)
