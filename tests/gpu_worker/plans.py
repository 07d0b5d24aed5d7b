"""Plans, and the sequences that a runner makes of them, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences, Share
from gpu_worker.core.plan import UNKNOWN_TOKEN, StepPlan
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence


def plan_of(
    items: Values[ScheduledSequence],
    *,
    departed: Iterable[Sequence] = (),
    step: int = 1,
    writer: PlanWriter | None = None,
) -> StepPlan:
    """Write a plan; sequences that come later need the same writer, or they get the same rows."""
    if not items:
        return StepPlan(step, [], [], 0)
    return (writer or PlanWriter()).write_any(items, departed, step)


def batch_sequence(sequence: Sequence, row: int = 0) -> BatchSequence:
    """Return what a runner knows of a sequence. It has the same lists, so it follows by itself."""
    known = BatchSequence(row, sequence.id, sequence.token_ids, sequence.num_prompt_tokens, sequence.sampling)
    known.stop_ids, known.bad_words, known.prediction = sequence.stop_ids, sequence.bad_words, sequence.prediction
    known.pooling, known.constraint, known.block_table = sequence.pooling, sequence.constraint, sequence.block_table
    known.state_slot = None if sequence.state_slot is None else sequence.state_slot.slot
    return known


def decodes_of(shares: Values[Share]) -> StepPlan:
    """Return the plan of decodes that a runner knows already."""
    rows, starts = [share.sequence.row for share in shares], [share.start for share in shares]
    return StepPlan(1, rows, starts, len(shares), len(shares), [UNKNOWN_TOKEN] * len(shares))


def shares_of(plans: Iterable[StepPlan]) -> list[list[Share]]:
    """Return the shares of plans that follow one another."""
    sequences, shares = BatchSequences(), []
    for plan in plans:
        sequences.apply(plan)
        shares.append(sequences.shares(plan))
    return shares
