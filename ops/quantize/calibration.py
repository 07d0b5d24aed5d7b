"""The tokens that calibration runs through the model: windows of a text, spread evenly over it."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError


def calibration_windows(tokenizer: ModelTokenizer, file: Path, num_samples: int, length: int) -> torch.Tensor:
    """Read a UTF-8 text and cut windows of equal length from it, which overlap only where the text is short.

    Shapes:
        result: `[num_samples, length]` int64

    Raises:
        ConfigError: The file cannot be read, or has fewer tokens than one window.
    """
    token_ids = torch.tensor(tokenizer.encode_text(read_text(file, "HEADRACE_CALIBRATION")))
    if len(token_ids) < length:
        problem = f"{file} has {len(token_ids)} tokens; a window needs {length}: give a longer text"
        raise ConfigError("HEADRACE_CALIBRATION", problem)
    starts = torch.linspace(0, len(token_ids) - length, num_samples).long()
    return token_ids[starts[:, None] + torch.arange(length)]


def read_text(file: Path, variable: str) -> str:
    """Read a text file.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8; names `variable`.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(variable, f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(variable, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
