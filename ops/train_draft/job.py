"""The job of training one draft: prepares the material, trains, measures, and writes the folder."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config
from ops.train_draft.eagle import EagleStudent, check_rotary_settings
from ops.train_draft.folder import check_folder, check_room, write_draft
from ops.train_draft.material import Material, MaterialPlan, Progress, prepare
from ops.train_draft.medusa import MedusaStudent
from ops.train_draft.optimization import Length, train
from ops.train_draft.rows import Rows
from ops.train_draft.sizes import DraftShape, check_sizes, num_weights
from ops.train_draft.small_model import SmallModelStudent, small_shape
from ops.train_draft.student import Student
from ops.train_draft.target import check_target, read_vocabulary
from shared.errors import ConfigError, HeadraceError

ANSWER_TOKENS = 128
"""How much of what the target wrote counts: left alone for long, small models repeat themselves, too easy to draft."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured.

    Attributes:
        by_position: For each token of a draft, in order, the share of drafts of which it and all before were accepted.
        num_drafts: Drafts that were looked at.
    """

    by_position: tuple[float, ...]
    num_drafts: int

    @property
    def mean_length(self) -> float:
        """Accepted tokens of a draft, on average; a step makes one token more."""
        return sum(self.by_position)


@torch.inference_mode()
def measure(student: Student, rows: Rows, own_from: torch.Tensor, count: int) -> Acceptance:
    """Measure a student on what the target wrote greedily, where the right token is the next one.

    Args:
        student: Drafts at each place of each row.
        rows: Each ends with what the target wrote.
        own_from: `[num_rows]`, where that begins.
        count: Tokens of a draft.
    """
    total, num_drafts = torch.zeros(0, dtype=torch.int64), 0
    for number, begin in enumerate(own_from.tolist()):
        batch = rows.batch(torch.tensor([number]))
        drafts = student.draft_tokens(batch, count)[0]
        first, depth = student.first_distance, drafts.shape[1]
        # A draft hangs behind a token that the target wrote, and ends before the answer does.
        end = min(batch.token_ids.shape[1], begin + ANSWER_TOKENS)
        begin = max(0, begin + 1 - first)
        places = torch.arange(begin, max(begin, end - first - depth + 1))
        wanted = batch.token_ids[0][places[:, None] + first + torch.arange(depth)]
        accepted = (drafts[places] == wanted).long().cumprod(1).sum(0)
        total = accepted if num_drafts == 0 else total + accepted
        num_drafts += len(places)
    return Acceptance(tuple((total / max(1, num_drafts)).tolist()), num_drafts)


KINDS = ("model", "medusa", "eagle")
_TOKENS_PER_STEP = 1024
_MEASURED_TOKENS = 6
_SAMPLED_ROWS = 64
_SHARES = 1000


@dataclass(frozen=True, slots=True)
class TrainDraftJob:
    """What to do.

    Attributes:
        kind: One of `KINDS`.
        out: New folder for the draft.
        length: When to stop.
        material: What to learn from; its seed is that of the draft's first weights, too.
    """

    kind: str
    out: Path
    length: Length
    material: MaterialPlan
    shape: DraftShape


@dataclass(frozen=True, slots=True)
class Training:
    """What a training came to."""

    steps: int
    num_tokens: int
    seconds: float
    first_loss: float
    last_loss: float
    acceptance: Acceptance


class TrainingDivergedError(HeadraceError):
    """Weights of a draft grew beyond what sixteen bits hold, or are no numbers."""

    def __init__(self, loss: float) -> None:
        """Describe the loss."""
        problem = f"the training diverged (loss {loss:.3g}); no draft was written"
        super().__init__(f"{problem}. Try another HEADRACE_SEED, or check that the target itself writes text")
        self.loss = loss


def train_draft(job: TrainDraftJob, progress: Progress) -> Training:
    """Do the job.

    Raises:
        ConfigError: A setting, a text or the target cannot be used.
        HeadraceError: The target cannot be loaded, or the training diverged.
    """
    check_job(job)
    return train_on(prepare(job.material, progress), job, progress)


def check_job(job: TrainDraftJob) -> None:
    """Refuse what cannot work before anything is computed.

    Raises:
        ConfigError: Says which setting is wrong and what is allowed.
        HeadraceError: The target's configuration is missing or damaged.
    """
    if job.kind not in KINDS:
        raise ConfigError("HEADRACE_KIND", f"{job.kind[:40]!r} is not one of {', '.join(KINDS)}")
    if job.length.steps is None and job.length.seconds is None:
        raise ConfigError("HEADRACE_MINUTES", "is needed, or HEADRACE_STEPS: they say how long to train")
    if job.length.seconds is not None and job.length.seconds <= 0:
        raise ConfigError("HEADRACE_MINUTES", "must be more than 0")
    if not job.material.text:
        raise ConfigError("HEADRACE_TEXT", "is required: text files like what the target will work on")
    num_heads, window = job.shape.num_heads, job.material.window
    if job.kind == "medusa" and num_heads >= window:
        problem = f"is {num_heads}; rows of {window} tokens (HEADRACE_WINDOW) take less than {window} heads"
        raise ConfigError("HEADRACE_MEDUSA_NUM_HEADS", problem)
    check_target(job.material.target)
    if job.kind == "eagle":
        check_rotary_settings(job.material.target)
    check_folder(job.out)
    check_sizes(job.kind, job.material.target, job.shape, job.out)


def train_on(material: Material, job: TrainDraftJob, progress: Progress) -> Training:
    """Train on material that is there, measure, and write the folder.

    Raises:
        ConfigError: The folder has no room for the draft.
        TrainingDivergedError: The weights are no numbers.
    """
    torch.manual_seed(job.material.seed)
    student = _make_student(job, read_model_config(job.material.target), material.training)
    # Preparation may have taken hours, in which others wrote.
    check_room(num_weights(student.module), job.out)
    rows_per_step = max(1, _TOKENS_PER_STEP // job.material.window)
    generator = torch.Generator().manual_seed(job.material.seed)
    losses: list[float] = []
    num_tokens, started = 0, time.monotonic()
    for step in train(student, material.training.batches(rows_per_step, generator), job.length):
        if not math.isfinite(step.loss):
            raise TrainingDivergedError(step.loss)
        losses.append(step.loss)
        num_tokens += step.num_tokens
        progress("training", int(step.fraction * _SHARES), _SHARES, f"loss {step.loss:.3f}")
    seconds = time.monotonic() - started
    progress("training", _SHARES, _SHARES, f"loss {losses[-1]:.3f}")
    # As it is written.
    student.module.half().float()
    if not all(bool(parameter.isfinite().all()) for parameter in student.module.parameters()):
        raise TrainingDivergedError(losses[-1])
    acceptance = measure(student, material.held_out, material.own_from, _MEASURED_TOKENS)
    write_draft(student, job.material.target, job.out)
    return Training(len(losses), num_tokens, seconds, losses[0], losses[-1], acceptance)


def _make_student(job: TrainDraftJob, target: ModelConfig, rows: Rows) -> Student:
    shape, model = job.shape, job.material.target
    vocabulary = read_vocabulary(model)
    if job.kind == "model":
        return SmallModelStudent(target, vocabulary, small_shape(target, shape.hidden_size, shape.num_layers))
    if job.kind == "medusa":
        heads, layers = shape.num_heads, shape.head_layers
        return MedusaStudent(target, vocabulary, heads, layers, shares_head=shape.shares_head)
    sample = rows.batch(torch.arange(min(_SAMPLED_ROWS, len(rows.token_ids))))
    return EagleStudent(target, vocabulary, model, shape.num_steps, sample)
