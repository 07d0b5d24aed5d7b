"""Whole servers beside each other over HTTP, on this machine's CPU: what is left of the engine's speed for a client.

Run as `make bench-served` or `python -m ops.bench.served`. Ours runs with its queue, beside llama.cpp's and vLLM's
servers at equal precision: random prompts in token ids, streams that begin together, decode rates as `engine_compare`
takes them, from the last first token to the first end. Each round starts every server anew, and measures our engine
without a queue too. Medians are printed, with ratios to the best peer, and appended to `results/served.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ops.bench.engine import Load
from ops.bench.engine_peers import PeerUnavailableError, Task, measure_ours
from ops.bench.make_model import SHAPES, Shape, Size, make_model
from ops.bench.quant_checkpoints import HEAD, make_checkpoints, random_words
from ops.bench.record import append_record
from ops.bench.served_servers import OURS, Server, max_tokens, servers
from ops.bench.served_streams import Address, Served, StreamError, serve_streams

# By the name of a precision: the method of ours, whose checkpoint vLLM reads too, and llama.cpp's own, which rounds the
# head as well.
PRECISIONS = {"bfloat16": (None, "BF16"), "int8": ("int8", "Q8_0"), "int4": ("rtn-int4", "Q4_0")}


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one server at one number of streams.

    Attributes:
        engine_rate: Decode tokens per second of our engine without queue and gateway; None for others.
    """

    server: str
    batch: int
    decode_rate: float
    ttft_p50_s: float
    ttft_max_s: float
    engine_rate: float | None = None


@dataclass(slots=True)
class Rounds:
    """What has been measured so far, by server and batch size, and why servers are missing."""

    served: dict[tuple[str, int], list[Served]]
    engine_rates: dict[int, list[float]]
    missing: dict[str, str]

    def rows(self) -> list[Row]:
        """Return the medians."""
        return [
            Row(
                name,
                batch,
                median(one.decode_rate for one in results),
                median(one.ttft_p50_s for one in results),
                median(one.ttft_max_s for one in results),
                median(self.engine_rates[batch]) if name == OURS else None,
            )
            for (name, batch), results in self.served.items()
            if name not in self.missing
        ]


def measure_all(found: list[Server], task: Task, vocab_size: int, rounds: int) -> Rounds:
    """Measure every server in every round, and our engine alone."""
    result = Rounds(defaultdict(list), defaultdict(list), {})
    for number in range(rounds):
        for server in found:
            if server.name in result.missing:
                continue
            print(f"round {number + 1} of {rounds}: {server.name}", file=sys.stderr, flush=True)
            try:
                with server.start(task) as address:
                    for batch, served in asyncio.run(_serve(address, task.loads, vocab_size, number)).items():
                        result.served[server.name, batch].append(served)
            except (PeerUnavailableError, StreamError) as error:
                result.missing[server.name] = str(error)
        for batch, measurement in measure_ours(task).items():
            result.engine_rates[batch].append(measurement.decode_rate)
    return result


async def _serve(address: Address, loads: list[Load], vocab_size: int, number: int) -> dict[int, Served]:
    """Serve a few tokens of the largest load to warm up, then each load; prompts depend on the round."""
    generator = random.Random(number)
    words = range(3, vocab_size)

    async def serve(load: Load, new: int) -> Served:
        prompts = [generator.choices(words, k=load.prompt) for _ in range(load.batch)]
        return await serve_streams(address, prompts, max_tokens(load.batch, new))

    await serve(max(loads, key=lambda load: load.batch), 1)
    return {load.batch: await serve(load, load.new) for load in loads}


def ratios(rows: list[Row]) -> dict[int, float | None]:
    """Return our decode rate over that of the best peer, by batch size; None where either is missing."""
    result: dict[int, float | None] = {}
    for batch in sorted({row.batch for row in rows}):
        rates = {row.server: row.decode_rate for row in rows if row.batch == batch}
        ours = rates.pop(OURS, None)
        result[batch] = ours / max(rates.values()) if ours and rates else None
    return result


def print_table(title: str, rows: list[Row], missing: dict[str, str]) -> None:
    """Print decode rates and times to the first token, a server a line."""
    batches = sorted({row.batch for row in rows})
    heads = [f"B{batch}" for batch in batches]
    print(f"\n{title}")
    print(f"{'decode tok/s':<16}" + "".join(f"{head:>9}" for head in heads), end="")
    print(f"{'TTFT p50 ms':>16}" + "".join(f"{head:>9}" for head in heads))
    for name in dict.fromkeys(row.server for row in rows):
        own = {row.batch: row for row in rows if row.server == name}
        rates = "".join(f"{own[batch].decode_rate:>9.0f}" for batch in batches)
        print(f"{name:<16}{rates}{'':>16}" + "".join(f"{own[batch].ttft_p50_s * 1e3:>9.0f}" for batch in batches))
    alone = {row.batch: row.engine_rate for row in rows if row.engine_rate is not None}
    if alone:
        print(f"{'engine alone':<16}" + "".join(f"{alone[batch]:>9.0f}" for batch in batches))
    cells = "".join(f"{ratio:>8.2f}x" if ratio else f"{'-':>9}" for ratio in ratios(rows).values())
    print(f"{'of best peer':<16}{cells}")
    for name, reason in missing.items():
        print(f"{name}: not available: {reason}")


def record(fields: dict[str, object], rows: list[Row], versions: dict[str, str | None]) -> None:
    """Append the results, a line a server and batch size, with the `fields` that all have in common."""
    command = " ".join(["python -m ops.bench.served", *sys.argv[1:]])
    for row in rows:
        figures: dict[str, object] = {
            "engine": row.server,
            "engine_version": versions[row.server],
            "batch": row.batch,
            "decode_tokens_per_s": round(row.decode_rate, 1),
            "ttft_p50_ms": round(row.ttft_p50_s * 1e3, 1),
            "ttft_max_ms": round(row.ttft_max_s * 1e3, 1),
        }
        if row.engine_rate is not None:
            figures["engine_alone_tokens_per_s"] = round(row.engine_rate, 1)
        append_record("served", command, {**fields, **figures})


def main() -> None:
    """Compare on every shape and precision."""
    # So that a server does not outlive us, whoever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _options()
    loads = [Load(int(batch), options.prompt, options.new) for batch in options.batch.split(",")]
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
                _compare(Size(shape), precision, loads, options, Path(folder))


def _compare(size: Size, precision: str, loads: list[Load], options: argparse.Namespace, folder: Path) -> None:
    method, llama_precision = PRECISIONS[precision]
    plain = folder / "plain"
    make_model(SHAPES[size], plain)
    model = plain if method is None else _quantized(SHAPES[size], plain, folder, method)
    found = servers(options.cache, plain, llama_precision)
    if options.servers is not None:
        found = [server for server in found if server.name in (OURS, *options.servers.split(","))]
    task = Task(model, loads, options.num_threads)
    result = measure_all(found, task, SHAPES[size].vocab_size, options.rounds)
    rows = result.rows()
    conditions = f"{task.num_threads} threads, prompt {options.prompt}, {options.new} decode steps"
    print_table(f"{size.value}, {precision}, {conditions}", rows, result.missing)
    fields: dict[str, object] = {"model": size.value, "dtype": precision, "threads": task.num_threads}
    fields |= {"prompt": options.prompt, "new": options.new, "not_available": result.missing}
    record(fields, rows, {server.name: server.version() for server in found if server.name not in result.missing})


def _quantized(shape: Shape, plain: Path, folder: Path, method: str) -> Path:
    calibration = random_words(shape.vocab_size, folder / "calibration.txt")
    name = method if shape.is_tied else f"{method}{HEAD}"
    return next(path for _, path in make_checkpoints(plain, folder, [name], calibration))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="15m,160m", help="of 15m, 160m")
    parser.add_argument("--precisions", default="bfloat16", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--batch", default="1,4,16,32", help="streams at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="decode steps of all streams together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--servers", help="ours and only these, separated by commas")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "bench"
    parser.add_argument("--cache", type=Path, default=default_cache, help="where the peers are installed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
