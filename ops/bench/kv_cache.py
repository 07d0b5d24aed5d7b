"""Attention of decodes on a CPU over a KV cache in bf16, int8 and fp8: ms a layer, side by side.

Run as `python -m ops.bench.kv_cache`. Each batch is attended over a cache of each format in turn, many times; the
caches are larger than the processor's own, so that the bytes read are part of the cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ops.bench.gpu.cases.attention_batch import AttentionShape, make_batch
from ops.bench.options import bench_parser
from ops.bench.record import ResultTable

NUM_SEQS = 32
NUM_ROUNDS = 15
FORMATS = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Query heads, KV heads, elements of a head, cached tokens of each sequence.
SHAPES = ((32, 8, 128, 512), (32, 8, 128, 2048), (16, 8, 128, 1024), (14, 2, 64, 2048))


def measure(num_heads: int, num_kv_heads: int, head_dim: int, context: int) -> dict[str, float]:
    """Return the median ms of one layer's attention, by the cache's format."""
    shape = AttentionShape("any", num_heads, num_kv_heads, head_dim)
    batch = make_batch(torch.device("cpu"), shape, [(1, context)] * NUM_SEQS)
    batches = {name: batch.with_cache_in(dtype) for name, dtype in FORMATS.items()}
    samples: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(NUM_ROUNDS):
        for name, one in batches.items():
            started = time.perf_counter()
            one.attend()
            samples[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(times[2:]) for name, times in samples.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and append its rows to the results."""
    bench_parser("kv_cache", __doc__).parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{NUM_SEQS} decodes, one thread")
    table = ResultTable("kv_cache")
    for num_heads, num_kv_heads, head_dim, context in SHAPES:
        times = measure(num_heads, num_kv_heads, head_dim, context)
        row = {"num_seqs": NUM_SEQS, "heads": f"{num_heads}/{num_kv_heads} x {head_dim}", "context": context}
        row |= {f"{name}_ms": round(value, 3) for name, value in times.items()}
        row |= {f"{name}_to_bf16": round(times[name] / times["bf16"], 3) for name in ("int8", "fp8")}
        table.add(row)


if __name__ == "__main__":
    main()
