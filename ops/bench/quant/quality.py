"""The quality of quantized models on the demo model's held-out text, through the engine that serves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.quant.checkpoints import PLAIN
from ops.demo_model.heldout import held_out_documents
from ops.perplexity import most_likely_tokens, score

KV_FORMATS = ("fp8", "int8")
# As `headrace perplexity` has them if not told otherwise.
_CONTEXT, _STRIDE = 1024, 512
_BLOCK_SIZE = 16


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
