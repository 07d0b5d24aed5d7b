"""What a worker compares itself with, and how often."""

from __future__ import annotations

from typing import cast

from gpu_worker.consumer.golden.watch import GoldenSettings, WithdrawRule
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.golden_baseline import VARIABLE, golden_baseline
from shared.errors import ConfigError


def golden_settings(config: WorkerConfig, model: str, vocab_size: int) -> GoldenSettings | None:
    """Return what to compare with; None where no baseline is given.

    Args:
        config: Names the files.
        model: What the worker serves, as clients call it.
        vocab_size: How many tokens that has.

    Raises:
        ConfigError: A file cannot be used, or is the baseline of another model.
    """
    baseline = golden_baseline(config, model)
    if baseline is None:
        return None
    largest = max(max(prompt.token_ids) for prompt in baseline.prompts)
    if largest >= vocab_size:
        problem = f"{config.golden} has token {largest}, and this model has {vocab_size}: it is of another model"
        raise ConfigError(VARIABLE, problem)
    return GoldenSettings(baseline, config.golden_share, cast("WithdrawRule", config.golden_withdraw))
