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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.comparison import add_load_options, add_model, loads_of, print_missing
from ops.bench.engine import Load, Measurement
from ops.bench.engine_compare import Measure, Results, measure_all
from ops.bench.make_model import SHAPES, Size, make_model
from ops.bench.options import add_list, bench_parser
from ops.bench.peers.engines import Task, converted_model, measure_llama, measure_ours
from ops.bench.quant.checkpoints import PLAIN, all_methods, make_checkpoints, random_words, training_text, weight_bytes
from ops.bench.record import ResultTable
from ops.demo_model.corpus import held_out_documents
from ops.perplexity import most_likely_tokens, score
from ops.stack.config import DEMO_MODEL

LLAMA_PRECISIONS = ("BF16", "Q8_0", "Q4_0")
KV_FORMATS = ("fp8", "int8")
# As `headrace perplexity` has them if not told otherwise.
_CONTEXT, _STRIDE = 1024, 512
_BLOCK_SIZE = 16


def measure(
    task: Task, models: Mapping[str, Path], llama: Path, rounds: int
) -> tuple[dict[str, int], Results, dict[str, str]]:
    """Measure every model, and llama.cpp's forms of the plain one; without rounds, only their sizes.

    Returns:
        Bytes of the weights by name, speeds by name and batch size, and why some are missing.
    """
    engines: dict[str, Measure] = {name: partial(_measure_at, model) for name, model in models.items()}
    files = dict(models)
    if rounds and (llama / "build").exists():
        for precision in LLAMA_PRECISIONS:
            name = f"llama.cpp {precision}"
            engines[name] = partial(measure_llama, home=llama, precision=precision)
            files[name] = converted_model(task.model, precision)
    measured, missing = measure_all(engines, task, rounds)
    return {name: weight_bytes(file) for name, file in files.items() if name not in missing}, measured, missing


def _measure_at(model: Path, task: Task) -> dict[int, Measurement]:
    return measure_ours(replace(task, model=model))


def rows(
    sizes: Mapping[str, int], measured: Results, quality: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, object]]:
    """Return what is recorded, a row a name; decode rates are multiples of those of the plain model, too."""
    for name, num_bytes in sizes.items():
        speeds = {batch: one for (engine, batch), one in sorted(measured.items()) if engine == name}
        row: dict[str, object] = {"name": name, "weights_mb": round(num_bytes / 1e6, 1), **quality.get(name, {})}
        row |= {f"decode_tokens_per_s_at_{batch}": round(one.decode_rate, 1) for batch, one in speeds.items()}
        if speeds:
            # With the largest batch.
            row["prefill_tokens_per_s"] = round(list(speeds.values())[-1].prefill_rate)
        for batch, one in speeds.items():
            if (PLAIN, batch) in measured:
                row[f"of_{PLAIN}_at_{batch}"] = round(one.decode_rate / measured[PLAIN, batch].decode_rate, 3)
        yield row


def quality_of(models: Mapping[str, Path], num_threads: int) -> dict[str, dict[str, float]]:
    """Return the quality of every model by its name, and of the plain one over a KV cache in eight bits."""
    plain = models[PLAIN]
    text = ModelTokenizer(read_model_directory(plain)).encode_text("".join(held_out_documents()))
    reference = most_likely(plain, text, num_threads)
    found = {name: quality(model, text, reference, num_threads) for name, model in models.items()}
    for kv_dtype in KV_FORMATS:
        found[f"{PLAIN}, KV {kv_dtype}"] = quality(plain, text, reference, num_threads, kv_dtype)
    return found


def quality(
    model: Path, text: Sequence[int], reference: Sequence[int], num_threads: int, kv_dtype: str = "auto"
) -> dict[str, float]:
    """Measure a model; `reference` is what `most_likely` returned for the plain one.

    Returns:
        What is recorded: the perplexity, at how many places its most likely token is that of the plain model, and how
        many places there are.
    """
    runner = build_runner(_runner_config(model, num_threads, kv_dtype))
    *_, last = score(runner, text, _CONTEXT, _STRIDE)
    chosen = most_likely_tokens(runner, text, _CONTEXT, _STRIDE)
    alike = sum(ours == theirs for ours, theirs in zip(chosen, reference, strict=True))
    return {
        "perplexity": round(last.perplexity, 4),
        "same_token_percent": round(100 * alike / len(reference), 2),
        "held_out_tokens": len(reference),
    }


def most_likely(model: Path, text: Sequence[int], num_threads: int) -> list[int]:
    """Return the token that a model takes for most likely at each place of a text but the first."""
    return most_likely_tokens(build_runner(_runner_config(model, num_threads, "auto")), text, _CONTEXT, _STRIDE)


def _runner_config(model: Path, num_threads: int, kv_dtype: str) -> RunnerConfig:
    return RunnerConfig(
        model,
        dtype="bfloat16",
        kv_cache_dtype=kv_dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=_CONTEXT // _BLOCK_SIZE + 1,
        max_num_seqs=1,
        max_model_len=_CONTEXT + 1,
        num_threads=num_threads,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoints and measure them."""
    parser = bench_parser("quant", __doc__)
    add_model(parser, f"calibrated on Python code, as {DEMO_MODEL.name} was trained", shape=Size.M160)
    add_list(parser, "--methods", str, all_methods(), "how it is rounded", all_methods())
    parser.add_argument("--perplexity", action="store_true", help="quality on the demo model's held-out text")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-quant-") as folder:
        _run(options, loads_of(options), Path(folder))


def _run(options: argparse.Namespace, loads: list[Load], folder: Path) -> None:
    if options.model is None:
        shape = SHAPES[options.shape]
        make_model(shape, folder / PLAIN)
        calibration = random_words(shape.vocab_size, folder / "calibration.txt")
    else:
        shutil.copytree(options.model, folder / PLAIN)
        calibration = training_text(folder / "calibration.txt")
    models = {PLAIN: folder / PLAIN}
    for name, path in make_checkpoints(models[PLAIN], folder, options.methods, calibration):
        print(f"made {name}", file=sys.stderr, flush=True)
        models[name] = path
    task = Task(models[PLAIN], loads, options.num_threads)
    sizes, measured, missing = measure(task, models, options.cache / "llama", options.rounds)
    scored = {name: models[name] for name in models if name in sizes}
    quality = quality_of(scored, options.num_threads) if options.perplexity else {}
    # Those over caches in eight bits are of the plain model.
    sizes |= {name: sizes[PLAIN] for name in quality if name not in sizes}
    title = options.shape if options.model is None else options.model.resolve().name
    asked = {"model": title, "threads": options.num_threads, "prompt": options.prompt, "new": options.new}
    made = list(rows(sizes, measured, quality))
    columns = dict.fromkeys(name for row in made for name in row)
    ResultTable("quant", list(columns)).add_all([asked | row for row in made])
    print_missing(missing, models)


if __name__ == "__main__":
    main()
