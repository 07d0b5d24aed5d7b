"""Whole servers beside each other over HTTP, on this machine's CPU: what is left of the engine's speed for a client.

Run as `make bench-served` or `python -m ops.bench.served`. Ours runs with its queue, beside llama.cpp's and vLLM's
servers at equal precision: random prompts in token ids, streams that begin together, decode rates as `engine_compare`
takes them, from the last first token to the first end. Each round starts every server anew, and measures our engine
without a queue too. Medians are printed, with ratios to the best peer, and appended to `results/served.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from ops.bench.comparison import (
    OURS,
    add_options,
    loads_of,
    measure_in_turn,
    print_missing,
    print_rates,
)
from ops.bench.engine import Load
from ops.bench.load.event_streams import Address
from ops.bench.load.served_streams import Served, serve_streams
from ops.bench.make_model import SHAPES, Shape, Size, make_model
from ops.bench.peers.engines import Task, measure_ours
from ops.bench.peers.servers import Server, max_tokens, servers
from ops.bench.quant.checkpoints import HEAD, make_checkpoints, random_words
from ops.bench.record import append_record, command_line

# By the name of a precision: the method of ours, whose checkpoint vLLM reads too, and llama.cpp's own, which rounds the
# head as well.
PRECISIONS = {"bfloat16": (None, "BF16"), "int8": ("int8", "Q8_0"), "int4": ("rtn-int4", "Q4_0")}


Results = dict[tuple[str, int], Served]


def measure_all(
    found: list[Server], task: Task, vocab_size: int, rounds: int
) -> tuple[Results, dict[int, float], dict[str, str]]:
    """Measure every server in every round, and our engine without queue and gateway beside our server.

    Returns:
        Medians by server and number of streams, decode rates of our engine alone, and why servers are missing.
    """
    engine_rates: dict[int, list[float]] = defaultdict(list)

    def in_round(server: Server, number: int) -> dict[int, Served]:
        with server.start(task) as address:
            served = asyncio.run(_serve(address, task.loads, vocab_size, number))
        if server.name == OURS:
            for batch, measurement in measure_ours(task).items():
                engine_rates[batch].append(measurement.decode_rate)
        return served

    results, missing = measure_in_turn({server.name: partial(in_round, server) for server in found}, rounds)
    alone = {batch: median(rates) for batch, rates in engine_rates.items() if (OURS, batch) in results}
    return results, alone, missing


async def _serve(address: Address, loads: list[Load], vocab_size: int, number: int) -> dict[int, Served]:
    """Serve a few tokens of the largest load to warm up, then each load; prompts depend on the round."""
    generator = random.Random(number)
    words = range(3, vocab_size)

    async def serve(load: Load, new: int) -> Served:
        prompts = [generator.choices(words, k=load.prompt) for _ in range(load.batch)]
        return await serve_streams(address, prompts, max_tokens(load.batch, new))

    await serve(max(loads, key=lambda load: load.batch), 1)
    return {load.batch: await serve(load, load.new) for load in loads}


def print_table(title: str, results: Results, engine_rates: dict[int, float]) -> None:
    """Print decode rates and times to the first token, a server a line."""
    print(f"\n{title}")
    waits: dict[str, str] = defaultdict(lambda: "   TTFT p50 ms")
    for (name, _), served in results.items():
        waits[name] += f" {served.ttft_p50_s * 1e3:.0f}"
    print_rates("decode tok/s", {key: served.decode_rate for key, served in results.items()}, waits)
    if engine_rates:
        print(f"{'engine alone':<16}" + "".join(f"{rate:>9.0f}" for rate in engine_rates.values()))


def record(
    fields: dict[str, object], results: Results, engine_rates: dict[int, float], versions: dict[str, str | None]
) -> None:
    """Append the results, a line a server and batch size, with the `fields` that all have in common."""
    for (name, batch), served in results.items():
        figures: dict[str, object] = {
            "engine": name,
            "engine_version": versions[name],
            "batch": batch,
            "decode_tokens_per_s": round(served.decode_rate, 1),
            "ttft_p50_ms": round(served.ttft_p50_s * 1e3, 1),
            "ttft_max_ms": round(served.ttft_max_s * 1e3, 1),
        }
        if name == OURS and batch in engine_rates:
            figures["engine_alone_tokens_per_s"] = round(engine_rates[batch], 1)
        append_record("served", command_line("served"), fields | figures)


def main() -> None:
    """Compare on every shape and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="15m,160m", help=f"of {', '.join(size.value for size in Size)}")
    parser.add_argument("--precisions", default="bfloat16", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--servers", help="ours and only these, separated by commas")
    add_options(parser)
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
                _compare(Size(shape), precision, options, Path(folder))


def _compare(size: Size, precision: str, options: argparse.Namespace, folder: Path) -> None:
    method, llama_precision = PRECISIONS[precision]
    plain = folder / "plain"
    make_model(SHAPES[size], plain)
    model = plain if method is None else _quantized(SHAPES[size], plain, folder, method)
    found = servers(options.cache, plain, llama_precision)
    if options.servers is not None:
        found = [server for server in found if server.name in (OURS, *options.servers.split(","))]
    task = Task(model, loads_of(options), options.num_threads)
    results, engine_rates, missing = measure_all(found, task, SHAPES[size].vocab_size, options.rounds)
    conditions = f"{task.num_threads} threads, prompt {options.prompt}, {options.new} decode steps"
    print_table(f"{size.value}, {precision}, {conditions}", results, engine_rates)
    print_missing(missing)
    fields: dict[str, object] = {"model": size.value, "dtype": precision, "threads": task.num_threads}
    fields |= {"prompt": options.prompt, "new": options.new, "not_available": missing}
    record(
        fields, results, engine_rates, {server.name: server.version() for server in found if server.name not in missing}
    )


def _quantized(shape: Shape, plain: Path, folder: Path, method: str) -> Path:
    calibration = random_words(shape.vocab_size, folder / "calibration.txt")
    name = method if shape.is_tied else f"{method}{HEAD}"
    return next(path for _, path in make_checkpoints(plain, folder, [name], calibration))


if __name__ == "__main__":
    main()
