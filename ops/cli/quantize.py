"""`headrace quantize`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.options import settings_command
from ops.cli.parts import check_device, require
from shared.config import REQUIRED, setting
from shared.model_hub import existing_model

if TYPE_CHECKING:
    from ops.quantize.job import Advance

# The number of experts without calibration tokens that a warning names.
_MAX_NAMES = 20


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """What to make, from what."""

    method: str = setting(REQUIRED, "How weights are rounded. Required.", choices=("int8", "fp8", "rtn-int4", "gptq"))
    model: Path = setting(REQUIRED, "Directory of the model, in Hugging Face's format, or its id at the hub. Required.")
    out: Path = setting(REQUIRED, "New directory for the quantized model. Required.")
    group_size: int = setting(128, "Inputs that share a scale, for the 4-bit methods: 32, 64, 128 or 256.", minimum=32)
    calibration: Path | None = setting(None, "UTF-8 text that gptq runs through the model.")
    samples: int = setting(128, "Windows of that text.", minimum=1, maximum=4096)
    window: int = setting(2048, "Tokens of a window; at most the model's context.", minimum=16)
    lm_head: bool = setting(
        False, "Round the head too, to eight bits: where it is large, most of what a step reads of a 4-bit model."
    )
    device: str = setting("cpu", "Where layers are computed: cpu, or a CUDA device.")


def run(config: QuantizeConfig) -> int:
    """Make a quantized copy of a model.

    It has the public checkpoint convention of its method. Works layer by layer, so that the model need not fit into
    memory.
    """
    require("worker", "torch", "numpy", "safetensors")
    from gpu_worker.models.registry import read_model_config
    from ops.quantize.job import quantize
    from ops.quantize.job_settings import QuantizeJob
    from ops.quantize.layer_blocks import unrounded_parts

    check_device(config.device)
    job = QuantizeJob(
        existing_model(config.model, "HEADRACE_MODEL", "a folder in Hugging Face's format, or an id at the hub"),
        config.out,
        config.method,
        config.group_size,
        config.calibration,
        config.samples,
        config.window,
        config.device,
        config.lm_head,
    )
    # A job that cannot be done ends here, before there is a bar.
    steps = quantize(job)
    unseen: list[str] = []
    try:
        first = next(steps)
        _advance(chain([first], steps), unseen)
    except KeyboardInterrupt:
        told = f"interrupted; delete {config.out} before you start again: it is incomplete"
        click.echo(f"\n{told}", err=True)
        raise
    if unseen:
        names, more = ", ".join(unseen[:_MAX_NAMES]), len(unseen) - _MAX_NAMES
        names += f" and {more} more" if more > 0 else ""
        click.echo(f"rounded to the nearest, because calibration routed no token to these experts: {names}")
    click.echo(f"left as they are: {', '.join(unrounded_parts(read_model_config(job.model)))}")
    click.echo(f"{config.method} checkpoint written to {config.out}")
    return 0


def _advance(steps: Iterable[Advance], unseen: list[str]) -> None:
    with click.progressbar(length=1, show_eta=True, show_pos=True, item_show_func=lambda name: name) as bar:
        done = 0
        for advance in steps:
            bar.length = advance.total
            bar.update(advance.done - done, advance.name)
            done = advance.done
            unseen += [advance.name] if advance.is_unseen else []


command = settings_command(QuantizeConfig, "quantize", run)
