"""Quantized models beside the same model in bfloat16, on this machine's CPU, in one run: speed, size and quality.

Run as `make bench-quant` or `python -m ops.bench.quant [--shape 160m | --model DIR] [--perplexity]`. Checkpoints of
every method of `headrace quantize` are made in a temporary folder, and those with a rounded head (`+head`) of models
that have one; llama.cpp, which rounds heads, runs the same weights where it has been built (`make bench-engine` builds
it). Several rounds share the machine's good and bad moments; medians are printed and appended to `results/quant.jsonl`.
With `--perplexity`, quality on the demo model's held-out text is measured too: perplexity, and how often the most
likely token is that of the model in bfloat16. `--rounds 0` measures nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from ops.bench.comparison import add_options, loads_of, print_missing
from ops.bench.engine import Load, Measurement
from ops.bench.engine_compare import Measure, measure_all
from ops.bench.make_model import SHAPES, Size, make_model
from ops.bench.peers.engines import Task, converted_model, measure_llama, measure_ours
from ops.bench.quant.checkpoints import PLAIN, all_methods, make_checkpoints, random_words, training_text, weight_bytes
from ops.bench.quant.quality import with_quality
from ops.bench.quant.result import Result
from ops.bench.record import append_record, command_line
from ops.stack.config import DEMO_MODEL

LLAMA_PRECISIONS = ("BF16", "Q8_0", "Q4_0")


def measure(task: Task, models: dict[str, Path], llama: Path, rounds: int) -> list[Result]:
    """Measure speed and size of every model, and of llama.cpp's forms of the plain one; without rounds, only sizes."""
    engines: dict[str, Measure] = {name: partial(_measure_at, model) for name, model in models.items()}
    if rounds and (llama / "build").exists():
        engines |= {
            f"llama.cpp {name}": partial(measure_llama, home=llama, precision=name) for name in LLAMA_PRECISIONS
        }
    measured, missing = measure_all(engines, task, rounds)
    print_missing(missing)
    sizes = {name: weight_bytes(model) for name, model in models.items()}
    sizes |= {
        name: weight_bytes(converted_model(task.model, name.split()[-1]))
        for name in engines
        if name not in models | missing
    }
    return [
        Result(name, sizes[name], {batch: one for (engine, batch), one in sorted(measured.items()) if engine == name})
        for name in engines
        if name not in missing
    ]


def _measure_at(model: Path, task: Task) -> dict[int, Measurement]:
    return measure_ours(replace(task, model=model))


def print_table(title: str, results: list[Result]) -> None:
    """Print a line a result, with decode rates beside those of bfloat16."""
    print(f"\n{title}")
    plain = results[0].measured
    heads = "".join(f"{f'B{batch}':>15}" for batch in plain)
    print(f"{'decode tok/s':<16}{'MB':>8}{'perplexity':>12}{'same token':>12}{heads}{'prefill':>10}")
    for result in results:
        cells = "".join(
            f"{result.measured[batch].decode_rate:>8.0f} {result.measured[batch].decode_rate / one.decode_rate:>5.2f}x"
            if batch in result.measured
            else f"{'-':>15}"
            for batch, one in plain.items()
        )
        quality = "-" if result.quality is None else f"{result.quality.perplexity:.3f}"
        alike = "-" if result.quality is None else f"{result.quality.same_token:.2%}"
        prefill = "-" if result.prefill_rate is None else f"{result.prefill_rate:.0f}"
        print(f"{result.name:<16}{result.num_bytes / 1e6:>8.1f}{quality:>12}{alike:>12}{cells}{prefill:>10}")


def record(title: str, task: Task, results: list[Result]) -> None:
    """Append the results, a line each."""
    load = task.loads[0]
    for result in results:
        shared = {"model": title, "threads": task.num_threads, "prompt": load.prompt, "new": load.new}
        append_record("quant", command_line("quant"), shared | result.figures())


def main() -> None:
    """Make the checkpoints and measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=[size.value for size in Size], default=Size.M160.value)
    source.add_argument("--model", type=Path, help=f"calibrated on Python code, as {DEMO_MODEL.name} was trained")
    parser.add_argument("--methods", help="separated by commas; all if not given")
    parser.add_argument("--perplexity", action="store_true", help="quality on the demo model's held-out text")
    add_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-quant-") as folder:
        _run(arguments, loads_of(arguments), Path(folder))


def _run(arguments: argparse.Namespace, loads: list[Load], folder: Path) -> None:
    shape = SHAPES[Size(arguments.shape)]
    if arguments.model is None:
        make_model(shape, folder / PLAIN)
        calibration = random_words(shape.vocab_size, folder / "calibration.txt")
    else:
        shutil.copytree(arguments.model, folder / PLAIN)
        calibration = training_text(folder / "calibration.txt")
    models = {PLAIN: folder / PLAIN}
    methods = all_methods() if arguments.methods is None else arguments.methods.split(",")
    for name, path in make_checkpoints(models[PLAIN], folder, methods, calibration):
        print(f"made {name}", file=sys.stderr, flush=True)
        models[name] = path
    task = Task(models[PLAIN], loads, arguments.num_threads)
    results = measure(task, models, arguments.cache / "llama", arguments.rounds)
    if arguments.perplexity:
        results = with_quality(results, models, arguments.num_threads)
    title = arguments.shape if arguments.model is None else arguments.model.resolve().name
    print_table(
        f"{title}, {arguments.num_threads} threads, prompt {loads[0].prompt}, {loads[0].new} decode steps", results
    )
    record(title, task, results)


if __name__ == "__main__":
    main()
