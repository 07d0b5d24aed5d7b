"""`headrace bench`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.bench_serve import compare_command, serve_command
from ops.cli.options import SettingsGroup, check_writable, settings_command
from ops.cli.parts import require
from shared.config import REQUIRED, setting
from shared.errors import ConfigError
from shared.model_hub import existing_model

if TYPE_CHECKING:
    from ops.bench.engine import EngineBench, Load


@dataclass(frozen=True, slots=True)
class BenchEngineConfig:
    """What to measure."""

    model: Path = setting(REQUIRED, "Directory of the model, in Hugging Face's format, or its id at the hub. Required.")
    batch: str = setting("1,4,16,32", "Batch sizes, separated by commas.")
    prompt: int = setting(512, "Tokens of each prompt.", minimum=1)
    new: int = setting(64, "Decode steps.", minimum=1)
    rounds: int = setting(3, "How often each is measured; the medians are shown.", minimum=1)
    temperature: float = setting(0.0, "0 takes the most likely token.", minimum=0)
    dtype: str = setting(
        "auto", "Number format of weights and activations.", choices=("auto", "float32", "bfloat16", "float16")
    )
    kv_cache_dtype: str = setting("auto", "Number format of the KV cache.", choices=("auto", "fp8", "int8"))
    num_threads: int | None = setting(None, "Threads of CPU operations; all cores but one if not given.", minimum=1)
    block_size: int = setting(16, "Tokens per KV block.", minimum=1, maximum=1024)
    max_num_batched_tokens: int = setting(512, "Token budget of a step.", minimum=1)
    json: Path | None = setting(None, "Write the results to this file, one JSON line a batch size.")


def run(config: BenchEngineConfig) -> int:
    """Measure the engine alone, without queue and gateway.

    It prints prefill and decode rates, the median time of a decode step, and, unless the weights are quantized, how
    fast the step reads weights and KV, as a share of the fastest read of as many bytes: a plain one with the same
    threads, or the step's own where that is faster. Both read what fits into a cache from there.
    """
    batches = _batches(config.batch)
    check_writable("HEADRACE_JSON", config.json)
    model = existing_model(config.model, "HEADRACE_MODEL")
    click.echo(f"loading {model}", err=True)
    require("worker", "torch", "numpy", "safetensors")
    from ops.bench.engine import EngineBench, Load, read_bandwidth

    bench = EngineBench(
        model,
        dtype=config.dtype,
        num_threads=config.num_threads,
        max_load=Load(max(batches), config.prompt, config.new),
        token_budget=max(config.max_num_batched_tokens, 2 * max(batches)),
        block_size=config.block_size,
        kv_dtype=config.kv_cache_dtype,
    )
    click.echo(f"{str(bench.dtype).removeprefix('torch.')}, memory read at {read_bandwidth() / 1e9:.1f} GB/s")
    heads = f"{'batch':>6} {'prefill tok/s':>14} {'decode tok/s':>13} {'step ms':>8} {'reads GB/s':>11}"
    click.echo(f"{heads} {'of fastest read':>16}")
    loads = [Load(batch, config.prompt, config.new) for batch in batches]
    lines = [_measure(bench, load, config) for load in loads]
    if config.json is not None:
        config.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def _measure(bench: EngineBench, load: Load, config: BenchEngineConfig) -> dict[str, object]:
    from ops.bench.engine import bandwidth_share, medians, read_bandwidth, share_text
    from ops.sizing.traffic import bytes_per_decode_step

    result = medians([bench.measure(load, temperature=config.temperature) for _ in range(config.rounds)])
    step_s = load.batch / result.decode_rate if result.step_s is None else result.step_s
    context = load.prompt + load.new // 2
    step_bytes = bytes_per_decode_step(bench.model_config, bench.dtype, load.batch, context, bench.weight_dtype)
    read_rate = read_bandwidth() if step_bytes is None else read_bandwidth(step_bytes)
    fraction = None if step_bytes is None else bandwidth_share(step_bytes, step_s, read_rate)
    rates = f"{load.batch:>6} {result.prefill_rate:>14.0f} {result.decode_rate:>13.1f} {step_s * 1e3:>8.2f}"
    reads = None if step_bytes is None else step_bytes / step_s / 1e9
    share = "-" if step_bytes is None else share_text(fraction, step_bytes)
    click.echo(f"{rates} {'-' if reads is None else f'{reads:.1f}':>11} {share:>16}")
    return {
        "command": " ".join(sys.argv),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "batch": load.batch,
        "prompt": load.prompt,
        "new": load.new,
        "prefill_tokens_per_s": round(result.prefill_rate, 1),
        "decode_tokens_per_s": round(result.decode_rate, 1),
        "step_ms": round(step_s * 1e3, 3),
        "bandwidth_fraction": None if fraction is None else round(fraction, 3),
        "step_gb_per_s": None if reads is None else round(reads, 1),
        "read_gb_per_s": round(read_rate / 1e9, 1),
    }


def _batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ConfigError("HEADRACE_BATCH", f"{text!r} is not a list of batch sizes like 1,4,16,32")
    return batches


command = SettingsGroup(
    "bench",
    commands=[settings_command(BenchEngineConfig, "engine", run), serve_command, compare_command],
    help="Measure an engine, or any server of OpenAI's API.",
)
