"""Settings of a quantization job, and the checks before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.models.config import ModelConfig
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.quantize.layer_blocks import matrices
from ops.quantize.methods import BITS, HEAD_BITS, Method
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What to do.

    Attributes:
        calibration: Text that the methods which look at inputs run through the model.
        samples: Windows of it.
        window: Tokens of a window.
        lm_head: The head is rounded too, to eight bits: of a tied vocabulary a copy, beside the embedding.
    """

    model: Path
    out: Path
    method: str
    group_size: int
    calibration: Path | None
    samples: int
    window: int
    device: str
    lm_head: bool = False


def check_job(config: ModelConfig, job: QuantizeJob, method: Method) -> None:
    """Refuse jobs that cannot work before anything is written.

    Raises:
        ConfigError: Names the wrong setting and the allowed values.
    """
    if config.quantization is not None:
        remedy = "serve it as it is, or name the model that it was made from"
        raise ConfigError("HEADRACE_MODEL", f"{job.model} is quantized already ({config.quantization.name}); {remedy}")
    if config.is_bidirectional:
        problem = "attention in both directions; serve it in its own numbers"
        raise ConfigError("HEADRACE_MODEL", f"{job.model} ({config.architecture}) has {problem}")
    if method.needs_inputs and job.calibration is None:
        problem = f"is required by {job.method}: a text like those that the model will work on"
        raise ConfigError("HEADRACE_CALIBRATION", problem)
    if job.out.resolve() == job.model.resolve():
        raise ConfigError("HEADRACE_OUT", "is the model's own folder; name another one")
    _check_group_size(config, method)
    _check_rows(config, job, method)


def _check_rows(config: ModelConfig, job: QuantizeJob, method: Method) -> None:
    """Refuse matrices whose output features do not fill the words of the method's checkpoints.

    Only of mixers and the head: the output features of other matrices are some matrix's input features, which groups
    of 32 or more divide.
    """
    # The head has twice the bits, so half as many make a word.
    if job.lm_head and config.vocab_size % (multiple := max(1, method.row_multiple * BITS // HEAD_BITS)):
        problem = (
            f"{job.method} stores multiples of {multiple} output features, and the head has {config.vocab_size} "
            "(vocab_size); use rtn-int4 or int8, or leave it out"
        )
        raise ConfigError("HEADRACE_LM_HEAD", problem)
    for index, layer in enumerate(config.layers):
        for name, linear in matrices(replace(layer, feed_forward=None), config).items():
            if name.endswith("output"):
                continue
            for module, rows in zip(linear.modules, linear.rows, strict=True):
                if rows % method.row_multiple:
                    problem = (
                        f"{job.method} stores multiples of {method.row_multiple} output features, and "
                        f"{module} of layer {index} has {rows}; use rtn-int4 or int8"
                    )
                    raise ConfigError("HEADRACE_METHOD", problem)


def _check_group_size(config: ModelConfig, method: Method) -> None:
    if method.group_size is None:
        return
    sizes = _input_sizes(config)
    allowed = [size for size in (32, 64, 128, 256) if all(count % size == 0 for _, count in sizes)]
    if method.group_size not in allowed:
        given = ", ".join(f"{name} {count}" for name, count in sizes)
        remedy = f"name {' or '.join(map(str, allowed))}" if allowed else "no group size does: use int8 or fp8"
        problem = f"is {method.group_size}, which must divide the input features of all matrices ({given}); {remedy}"
        raise ConfigError("HEADRACE_GROUP_SIZE", problem)


def _input_sizes(config: ModelConfig) -> list[tuple[str, int]]:
    """Return the features that matrices of layers are given, with what they are."""
    sizes = {config.hidden_size: "hidden_size"}
    for layer in config.layers:
        for name, linear in matrices(layer, config).items():
            what = "intermediate_size" if name == "down" else f"the input of {linear.modules[0]}"
            sizes.setdefault(linear.columns, what)
    return [(what, count) for count, what in sizes.items()]


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
    """Read a text file; `ConfigError`, which names `variable`, if it cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(variable, f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(variable, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
