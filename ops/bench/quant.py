"""Quantized models beside the same model in bfloat16, on this machine's CPU, in one run: speed, size and perplexity.

Run as `make bench-quant` or `python -m ops.bench.quant [--shape 160m | --model DIR] [--perplexity]`. Checkpoints of
every method of `headrace quantize` are made in a temporary folder; llama.cpp runs the same weights where it has been
built (`make bench-engine` builds it). Several rounds share the machine's good and bad moments; medians are printed and
appended to `results/quant.jsonl`. With `--perplexity`, the model's on the demo model's held-out text is measured too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ops.bench.engine import Load, Measurement
from ops.bench.engine_compare import Measure, Row, measure_all
from ops.bench.engine_peers import Task, converted_model, measure_llama, measure_ours
from ops.bench.make_model import SHAPES, Size, make_model
from ops.bench.quant_checkpoints import (
    METHODS,
    PLAIN,
    make_checkpoints,
    random_words,
    training_text,
    weight_bytes,
)
from ops.bench.record import append_record
from ops.demo_model.heldout import held_out_documents
from ops.stack.config import DEMO_MODEL

LLAMA_PRECISIONS = ("BF16", "Q8_0", "Q4_0")
KV_FORMATS = ("fp8", "int8")
_CONTEXT = 1024
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and precision.

    Attributes:
        num_bytes: Of the weights.
        rows: A batch size each.
        perplexity: None where it is not measured.
    """

    name: str
    num_bytes: int
    rows: list[Row]
    perplexity: float | None = None

    def figures(self) -> dict[str, object]:
        """Return what is printed and recorded."""
        rates = {f"decode_tokens_per_s_at_{row.batch}": round(row.decode_rate, 1) for row in self.rows}
        prefill = {"prefill_tokens_per_s": round(self.rows[-1].prefill_rate)} if self.rows else {}
        quality = {} if self.perplexity is None else {"perplexity": round(self.perplexity, 4)}
        return {"name": self.name, "weights_mb": round(self.num_bytes / 1e6, 1), **quality, **rates, **prefill}


def perplexity(model: Path, text: Path, num_threads: int, kv_dtype: str = "auto") -> float:
    """Measure a model as `headrace perplexity` does, in bfloat16."""
    command = [sys.executable, "-m", "ops.cli", "perplexity", "--model", str(model), "--text", str(text)]
    command += ["--dtype", "bfloat16", "--context", str(_CONTEXT), "--num-threads", str(num_threads)]
    output = subprocess.run(
        [*command, "--kv-dtype", kv_dtype], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
    found = re.search(r"perplexity ([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


def measure(task: Task, models: dict[str, Path], llama: Path, rounds: int) -> list[Result]:
    """Measure speed and size of every model, and of llama.cpp's forms of the plain one."""
    engines: dict[str, Measure] = {name: partial(_measure_at, model) for name, model in models.items()}
    if (llama / "build").exists():
        engines |= {
            f"llama.cpp {name}": partial(measure_llama, home=llama, precision=name) for name in LLAMA_PRECISIONS
        }
    rows, missing = measure_all(engines, task, rounds)
    for name, reason in missing.items():
        print(f"{name}: not available: {reason}", file=sys.stderr)
    sizes = {name: weight_bytes(model) for name, model in models.items()}
    sizes |= {
        name: weight_bytes(converted_model(task.model, name.split()[-1]))
        for name in engines
        if name not in models | missing
    }
    return [
        Result(name, sizes[name], sorted((row for row in rows if row.engine == name), key=lambda row: row.batch))
        for name in engines
        if name not in missing
    ]


def _measure_at(model: Path, task: Task) -> dict[int, Measurement]:
    return measure_ours(replace(task, model=model))


def with_perplexity(results: list[Result], models: dict[str, Path], text: Path, num_threads: int) -> list[Result]:
    """Add the perplexity of every model, and of the plain one over a KV cache in eight bits."""
    scored = [
        replace(result, perplexity=perplexity(models[result.name], text, num_threads))
        if result.name in models
        else result
        for result in results
    ]
    plain = results[0]
    caches = [
        Result(f"{PLAIN}, KV {name}", plain.num_bytes, [], perplexity(models[PLAIN], text, num_threads, name))
        for name in KV_FORMATS
    ]
    return scored + caches


def print_table(title: str, results: list[Result]) -> None:
    """Print a line a result, with decode rates beside those of bfloat16."""
    print(f"\n{title}")
    plain, batches = results[0], [row.batch for row in results[0].rows]
    heads = "".join(f"{f'B{batch}':>15}" for batch in batches)
    print(f"{'decode tok/s':<16}{'MB':>8}{'perplexity':>12}{heads}{'prefill':>10}")
    for result in results:
        rates = {row.batch: row.decode_rate for row in result.rows}
        cells = "".join(
            f"{rates[row.batch]:>8.0f} {rates[row.batch] / row.decode_rate:>5.2f}x"
            if row.batch in rates
            else f"{'-':>15}"
            for row in plain.rows
        )
        quality = "-" if result.perplexity is None else f"{result.perplexity:.3f}"
        prefill = f"{result.rows[-1].prefill_rate:.0f}" if result.rows else "-"
        print(f"{result.name:<16}{result.num_bytes / 1e6:>8.1f}{quality:>12}{cells}{prefill:>10}")


def record(title: str, task: Task, results: list[Result]) -> None:
    """Append the results, a line each."""
    command = " ".join(["python -m ops.bench.quant", *sys.argv[1:]])
    load = task.loads[0]
    for result in results:
        shared = {"model": title, "threads": task.num_threads, "prompt": load.prompt, "new": load.new}
        append_record("quant", command, shared | result.figures())


def main() -> None:
    """Make the checkpoints and measure them."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=[size.value for size in Size], default=Size.M160.value)
    source.add_argument("--model", type=Path, help=f"calibrated on Python code, as {DEMO_MODEL.name} was trained")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batch", default="1,4,16,32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--perplexity", action="store_true", help="on the demo model's held-out text")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "bench"
    parser.add_argument("--cache", type=Path, default=default_cache, help="where llama.cpp was built")
    arguments = parser.parse_args()
    loads = [Load(int(batch), arguments.prompt, arguments.new) for batch in arguments.batch.split(",")]
    with tempfile.TemporaryDirectory(prefix="headrace-quant-") as folder:
        _run(arguments, loads, Path(folder))


def _run(arguments: argparse.Namespace, loads: list[Load], folder: Path) -> None:
    shape = SHAPES[Size(arguments.shape)]
    if arguments.model is None:
        make_model(shape, folder / PLAIN)
        calibration = random_words(shape.vocab_size, folder / "calibration.txt")
    else:
        shutil.copytree(arguments.model, folder / PLAIN)
        calibration = training_text(folder / "calibration.txt")
    models = {PLAIN: folder / PLAIN}
    for name, path in make_checkpoints(models[PLAIN], folder, arguments.methods.split(","), calibration):
        print(f"made {name}", file=sys.stderr, flush=True)
        models[name] = path
    task = Task(models[PLAIN], loads, arguments.num_threads)
    results = measure(task, models, arguments.cache / "llama", arguments.rounds)
    if arguments.perplexity:
        text = folder / "held_out.txt"
        text.write_text("".join(held_out_documents()), encoding="utf-8")
        results = with_perplexity(results, models, text, arguments.num_threads)
    title = arguments.shape if arguments.model is None else arguments.model.resolve().name
    print_table(
        f"{title}, {arguments.num_threads} threads, prompt {loads[0].prompt}, {loads[0].new} decode steps", results
    )
    record(title, task, results)


if __name__ == "__main__":
    main()
