"""Reads the baseline that a worker compares itself with, and refuses one that is not its own. Imports no engine."""

from __future__ import annotations

from gpu_worker.quantization.gguf.model_file import SUFFIX
from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError
from shared.golden import Baseline, read_baseline, read_key

VARIABLE, _KEY_VARIABLE = "HEADRACE_GOLDEN", "HEADRACE_GOLDEN_KEY_FILE"


def served_name(config: WorkerConfig) -> str:
    """Return what clients call the model."""
    assert config.model is not None
    return config.served_model_name or config.model.resolve().name.removesuffix(SUFFIX)


def golden_baseline(config: WorkerConfig, model: str) -> Baseline | None:
    """Return the baseline of what a worker serves; None where none is given.

    `ConfigError` if a file cannot be used, or is the baseline of another model.
    """
    if config.golden is None:
        if config.golden_key_file is not None:
            raise ConfigError(_KEY_VARIABLE, f"is set, but {VARIABLE} is not: there is nothing to verify")
        return None
    if config.golden_key_file is None:
        raise ConfigError(_KEY_VARIABLE, f"is required with {VARIABLE}: the key that the baseline was signed with")
    baseline = read_baseline(config.golden, read_key(config.golden_key_file, _KEY_VARIABLE), VARIABLE)
    if baseline.model != model:
        raise ConfigError(VARIABLE, f"{config.golden} is of {baseline.model!r}, and this worker serves {model!r}")
    return baseline
