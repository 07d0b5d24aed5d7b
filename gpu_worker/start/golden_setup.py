"""Reads the baseline that a worker compares itself with, and refuses one that is not its own."""

from __future__ import annotations

from typing import cast

from gpu_worker.consumer.golden.watch import GoldenSettings, WithdrawRule
from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError
from shared.golden import read_baseline, read_key

_VARIABLE, _KEY_VARIABLE = "HEADRACE_GOLDEN", "HEADRACE_GOLDEN_KEY_FILE"


def golden_settings(config: WorkerConfig, model: str, vocab_size: int) -> GoldenSettings | None:
    """Return what to compare with; None where no baseline is given.

    Args:
        config: Names the files.
        model: What the worker serves, as clients call it.
        vocab_size: How many tokens that has.

    Raises:
        ConfigError: A file cannot be used, or is the baseline of another model.
    """
    if config.golden is None:
        if config.golden_key_file is not None:
            raise ConfigError(_KEY_VARIABLE, f"is set, but {_VARIABLE} is not: there is nothing to verify")
        return None
    if config.golden_key_file is None:
        raise ConfigError(_KEY_VARIABLE, f"is required with {_VARIABLE}: the key that the baseline was signed with")
    key = read_key(config.golden_key_file, _KEY_VARIABLE)
    baseline = read_baseline(config.golden, key, _VARIABLE)
    if baseline.model != model:
        raise ConfigError(_VARIABLE, f"{config.golden} is of {baseline.model!r}, and this worker serves {model!r}")
    largest = max(max(prompt.token_ids) for prompt in baseline.prompts)
    if largest >= vocab_size:
        problem = f"{config.golden} has token {largest}, and this model has {vocab_size}: it is of another model"
        raise ConfigError(_VARIABLE, problem)
    return GoldenSettings(baseline, config.golden_share, cast("WithdrawRule", config.golden_withdraw))
