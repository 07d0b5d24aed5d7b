"""`headrace train-draft`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.options import VariableOption, settings_command
from ops.cli.parts import require
from shared.config import setting
from shared.errors import ConfigError
from shared.model_hub import existing_model

if TYPE_CHECKING:
    from ops.train_draft.job import TrainDraftJob, Training


@dataclass(frozen=True, slots=True)
class TrainDraftConfig:
    """What to train, for what, on what."""

    kind: str | None = setting(
        None,
        "What the draft is: a smaller model, Medusa heads, or an EAGLE layer. Required.",
        choices=("model", "medusa", "eagle"),
    )
    target: Path | None = setting(
        None, "Directory of the model that the draft is for, in Hugging Face's format, or its id at the hub. Required."
    )
    out: Path | None = setting(None, "New directory for the draft. Required.")
    minutes: float | None = setting(None, "Time to train for, preparation not counted.", minimum=0, maximum=525_600)
    steps: int | None = setting(
        None, "Steps to train for; the first limit that is reached counts.", minimum=1, maximum=10**9
    )
    tokens: int = setting(
        1_000_000,
        "Tokens to learn from; the target's hidden vectors for them are kept in memory.",
        minimum=1,
        maximum=10**12,
    )
    own_share: float = setting(
        0.5,
        "Share of them in rows that the target writes itself, on beginnings from the text: what it will be asked for.",
        minimum=0,
        maximum=1,
    )
    window: int = setting(512, "Tokens of a row.", minimum=16)
    held_out: Path | None = setting(None, "Text to measure on; the last tenth of the text if not given.")
    hidden_size: int | None = setting(
        None, "model: width; a quarter of the target's if not given.", minimum=32, maximum=65536
    )
    num_layers: int | None = setting(
        None, "model: layers; an eighth of the target's if not given.", minimum=1, maximum=1000
    )
    medusa_num_heads: int = setting(3, "medusa: heads.", minimum=1, maximum=16)
    medusa_num_layers: int = setting(1, "medusa: residual blocks of a head.", minimum=1, maximum=16)
    medusa_shared_head: bool = setting(
        False, "medusa: use the target's vocabulary matrix for all heads. Small, but only this project reads it."
    )
    eagle_num_steps: int = setting(2, "eagle: draft tokens to unroll in training.", minimum=1, maximum=8)
    num_threads: int | None = setting(None, "Threads of CPU operations; all cores but one if not given.", minimum=1)
    seed: int = setting(0, "Of first weights, samples and the order of rows.", minimum=0, maximum=2**32 - 1)


def run(config: TrainDraftConfig, text: tuple[str, ...]) -> int:
    """Train a draft for a model.

    `headrace worker --draft-model` serves it. The draft learns to say what the model would say. In the end it is
    measured how many of its tokens the model accepts on beginnings that it has not learned from. Runs on the CPU.
    """
    require("worker", "torch", "numpy", "safetensors", "tokenizers")
    for name in ("kind", "target", "out"):
        if getattr(config, name) is None:
            raise ConfigError(f"HEADRACE_{name.upper()}", "is required; see headrace train-draft --help")
    import torch

    from gpu_worker.execution.runner_config import choose_num_threads
    from ops.train_draft.job import train_draft

    torch.set_num_threads(choose_num_threads(config.num_threads))
    job = _job(config, text)
    try:
        with _StageBars() as bars:
            training = train_draft(job, bars.advance)
    except KeyboardInterrupt:
        click.echo(f"\ninterrupted; there is no draft in {config.out}", err=True)
        raise
    _tell(config, training)
    return 0


class _StageBars:
    """A progress bar for each stage, one after another, so that each has an estimate of its own."""

    def __init__(self) -> None:
        self._stage = ""
        self._bars = ExitStack()
        self._done = 0

    def __enter__(self) -> _StageBars:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def advance(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show how far the stage is; what is counted may be anything."""
        if stage != self._stage:
            self._bars.close()
            bar = click.progressbar(length=total, label=stage, show_eta=True, item_show_func=lambda name: name)
            self._bar = self._bars.enter_context(bar)
            self._stage, self._done = stage, 0
        self._bar.update(done - self._done, note)
        self._done = done


def _tell(config: TrainDraftConfig, training: Training) -> None:
    acceptance = training.acceptance
    click.echo(
        f"{config.kind} draft written to {config.out}: {training.steps} steps, {training.num_tokens} tokens, "
        f"{training.seconds / 60:.1f} minutes; loss {training.first_loss:.3f} to {training.last_loss:.3f}"
    )
    shares = ", ".join(f"{share:.1%}" for share in acceptance.by_position)
    click.echo(
        f"greedy drafts accepted up to their 1st, 2nd, ... token: {shares} (of {acceptance.num_drafts}); "
        f"{acceptance.mean_length:.2f} tokens accepted a draft"
    )


def _job(config: TrainDraftConfig, text: tuple[str, ...]) -> TrainDraftJob:
    from ops.train_draft.job import TrainDraftJob
    from ops.train_draft.material import MaterialPlan
    from ops.train_draft.optimization import Length
    from ops.train_draft.sizes import DraftShape

    assert config.kind is not None
    assert config.target is not None
    assert config.out is not None
    return TrainDraftJob(
        config.kind,
        config.out,
        Length(config.steps, None if config.minutes is None else config.minutes * 60),
        MaterialPlan(
            existing_model(config.target, "HEADRACE_TARGET"),
            tuple(map(Path, text)),
            () if config.held_out is None else (config.held_out,),
            config.tokens,
            config.own_share,
            config.window,
            config.seed,
        ),
        DraftShape(
            config.hidden_size,
            config.num_layers,
            config.medusa_num_heads,
            config.medusa_num_layers,
            config.medusa_shared_head,
            config.eagle_num_steps,
        ),
    )


_TEXT = VariableOption(
    ["--text"],
    multiple=True,
    type=click.Path(),
    envvar="HEADRACE_TEXT",
    metavar="FILE",
    help="UTF-8 text to learn from; may be given again. Required.",
)
command = settings_command(TrainDraftConfig, "train-draft", run, [_TEXT])
