"""What holds after any traffic: answers, what was counted on the way, and that nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry
from gpu_worker.execution.drafts.proposer import ComputedTokens, Proposer
from gpu_worker.speculative.draft_model.proposer import DraftModelProposer
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from tests.gpu_worker.matrix.factors import EngineCell
from tests.gpu_worker.matrix.traffic import Answer, Choice, Traffic

# Eight bits may round the other way where what is rounded differs in its last bit.
TOLERANCES = {"auto": 1e-4, "int8": 0.02, "fp8": 0.05}


def check_answer(choice: Choice, cell: EngineCell, traffic: Traffic, whole: Answer) -> None:
    """Assert that a sequence was answered like `whole`, less what an earlier attempt had delivered."""
    sequence = next(sequence for sequence in traffic.sequences if sequence.id == choice.name)
    answer, where = traffic.answers[choice.name], f"{choice.name} in {cell}"
    num_emitted = traffic.num_emitted[choice.name]
    assert answer.token_ids == whole.token_ids[num_emitted:], where
    assert answer.finishes == whole.finishes, where
    assert sequence.num_prompt_tokens == len(choice.prompt()), where
    assert sequence.num_output_tokens == len(whole.token_ids), where
    tolerance = TOLERANCES[cell.kv_cache]
    assert len(whole.logprobs) == (0 if choice.ask.reports == "nothing" else len(whole.token_ids)), where
    _check_logprobs(answer.logprobs, whole.logprobs[num_emitted:], tolerance, where)
    if answer.token_ids:
        # Who has all tokens already is told nothing but the end.
        _check_logprobs(answer.prompt_logprobs, whole.prompt_logprobs, tolerance, where)
    if choice.ask.reports == "prompt_logprobs":
        assert sequence.num_cached_tokens == 0, where
    elif (choice.ask.prefix, cell.blocks) == ("hit", "ample") and answer.token_ids:
        assert sequence.num_cached_tokens >= 8, where


def check_usage(traffic: Traffic) -> None:
    """Assert that what sequences and engine count as drafted and accepted fits together, and the tokens there are."""
    speculation = traffic.parts.scheduler.speculation
    assert speculation is not None
    drafted = sum(sequence.num_drafted_tokens for sequence in traffic.sequences)
    accepted = sum(sequence.num_accepted_tokens for sequence in traffic.sequences)
    assert (drafted, accepted) == (speculation.num_draft_tokens, speculation.num_accepted_tokens)
    for sequence in traffic.sequences:
        answer = traffic.answers[sequence.id]
        # Each step adds one token of its own, but for one that ends with a draft token. Forced tokens are not drafts.
        num_own = len(answer.token_ids) - sequence.num_accepted_tokens
        least = answer.num_events - (answer.finishes == ["stop"])
        assert least <= num_own, sequence.id
        assert num_own <= answer.num_events or sequence.constraint is not None, sequence.id
        assert sequence.num_accepted_tokens <= sequence.num_drafted_tokens


def check_between_steps(traffic: Traffic) -> None:
    """Assert that what a proposer counts is what it keeps."""
    proposer = traffic.parts.proposer
    if isinstance(proposer, HiddenVectorProposer):
        assert proposer._num_kept == sum(pending.count for pending in proposer._pending.values())


def check_nothing_is_left(traffic: Traffic, last: str) -> None:
    """Assert that blocks, rows and the proposer's knowledge are free again, but for what the sequence `last` had."""
    scheduler, runner, proposer = traffic.parts.scheduler, traffic.parts.runner, traffic.parts.proposer
    scheduler.check_integrity()
    assert scheduler.stats.free_blocks == scheduler.config.num_blocks
    assert {sequence.id for sequence in traffic.sequences if sequence.row is not None} <= {last}
    assert {sequence.id for sequence in runner._sequences} <= {last}
    if proposer is None:
        return
    assert runner._drafting is not None
    assert runner._drafting._proposer is proposer, "the proposer failed on the way"
    assert _held_by(proposer) <= {last}
    if isinstance(proposer, HiddenVectorProposer):
        # A row is free again when the next plan tells that its sequence has left.
        rows, writer = proposer._rows, proposer._rows._writer
        leaving = [sequence for sequence in rows._departed if sequence.row is not None]
        assert writer._num_rows - len(writer._free) == len(_rows_held(proposer)) + len(leaving)
    if isinstance(proposer, DraftModelProposer):
        proposer._pool.check_integrity()
        # The policy may have asked for no draft of the last one.
        num_held = sum(len(double.sequence.block_table) for double in proposer._shadows.values() if double is not None)
        assert proposer._pool.num_available == proposer._pool.num_blocks - num_held


def _rows_held(proposer: HiddenVectorProposer) -> list[int]:
    return [pending.shifted.row for pending in proposer._pending.values() if pending.shifted.row is not None]


def _held_by(proposer: Proposer) -> set[str]:
    """Return the sequences that a proposer keeps something for, whatever it calls it."""
    return set().union(*map(_names_in, vars(proposer).values()))


def _names_in(value: object) -> set[str]:
    if isinstance(value, Sequence):
        return {value.id}
    if isinstance(value, ComputedTokens):
        return {value.sequence.id}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        return set().union(*map(_names_in, value))
    return set()


def _check_logprobs(got: Values[LogprobEntry], expected: Values[LogprobEntry], tolerance: float, where: str) -> None:
    assert [entry.token_id for entry in got] == [entry.token_id for entry in expected], where
    values = [[entry.logprob, *(value for _, value in entry.top)] for entry in got]
    for value, entry in zip(values, expected, strict=True):
        assert value == pytest.approx([entry.logprob, *(top for _, top in entry.top)], abs=tolerance), where
