"""`headrace perplexity`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.options import settings_command
from ops.cli.parts import check_device, require
from shared.config import REQUIRED, setting
from shared.errors import ConfigError
from shared.model_hub import existing_model

if TYPE_CHECKING:
    from ops.perplexity import Score

_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """What to measure."""

    model: Path = setting(REQUIRED, "Directory of the model, in Hugging Face's format. Required.")
    text: Path = setting(REQUIRED, "UTF-8 text to measure on. Required.")
    context: int | None = setting(
        None, "Tokens of a window; 2048 if not given, or what the model can see if that is less.", minimum=2
    )
    stride: int | None = setting(None, "Tokens from one window to the next; half a window if not given.", minimum=1)
    dtype: str = setting(
        "auto", "Number format of weights and activations.", choices=("auto", "float32", "bfloat16", "float16")
    )
    kv_cache_dtype: str = setting("auto", "Number format of the KV cache.", choices=("auto", "fp8", "int8"))
    device: str = setting("cpu", "Where the model runs: cpu, or a CUDA device.")
    num_threads: int | None = setting(None, "Threads of CPU operations; all cores but one if not given.", minimum=1)


def run(config: PerplexityConfig) -> int:
    """Measure how well a model predicts a text.

    The engine that serves it computes it. Windows of the text slide by a stride; each token is scored once, with at
    least a window less a stride before it.
    """
    require("worker", "torch", "numpy", "safetensors", "tokenizers")
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.text.model_directory import read_model_directory
    from gpu_worker.text.tokenizer import ModelTokenizer
    from ops.perplexity import score
    from ops.quantize.job_settings import read_text

    check_device(config.device)
    model = existing_model(config.model, "HEADRACE_MODEL")
    directory = read_model_directory(model)
    context, stride = _window(config, directory.max_model_len)
    token_ids = ModelTokenizer(directory).encode_text(read_text(config.text, "HEADRACE_TEXT"))
    if len(token_ids) < 2:
        raise ConfigError("HEADRACE_TEXT", f"{config.text} has {len(token_ids)} tokens; at least 2 are needed")
    runner = build_runner(
        RunnerConfig(
            model,
            dtype=config.dtype,
            device=config.device,
            kv_cache_dtype=config.kv_cache_dtype,
            max_num_seqs=1,
            max_model_len=context + 1,
            num_threads=config.num_threads,
        )
    )
    result = _last(score(runner, token_ids, context, stride), len(token_ids) - 1)
    click.echo(
        f"perplexity {result.perplexity:.4f} ({result.nats / result.num_tokens:.5f} nats a token, "
        f"{result.num_tokens} tokens, context {context}, stride {stride}, {str(runner.dtype).removeprefix('torch.')}, "
        f"KV cache {config.kv_cache_dtype})"
    )
    return 0


def _last(scores: Iterator[Score], num_tokens: int) -> Score:
    """Return the score of all tokens, with a progress bar; an interrupt prints the score so far."""
    result = None
    try:
        with click.progressbar(length=num_tokens, show_eta=True) as bar:
            for latest in scores:
                bar.update(latest.num_tokens - (result.num_tokens if result else 0))
                result = latest
    except KeyboardInterrupt:
        so_far = f"; perplexity {result.perplexity:.4f} over the first {result.num_tokens} tokens" if result else ""
        click.echo(f"\ninterrupted{so_far}; nothing is kept: started again it begins anew", err=True)
        raise
    assert result is not None
    return result


def _window(config: PerplexityConfig, max_model_len: int) -> tuple[int, int]:
    context = config.context or min(_DEFAULT_CONTEXT, max_model_len - 1)
    if context >= max_model_len:
        raise ConfigError("HEADRACE_CONTEXT", f"is {context}; the model takes {max_model_len - 1} tokens at most")
    stride = config.stride or max(1, context // 2)
    if stride >= context:
        raise ConfigError("HEADRACE_STRIDE", f"is {stride}; it must be less than the context, {context}")
    return context, stride


command = settings_command(PerplexityConfig, "perplexity", run)
