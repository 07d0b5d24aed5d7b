"""Proposers that fail are left out, whatever they were asked for; they are shown steps when they are asked."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.draft import Draft
from gpu_worker.core.step import SampledTokens
from gpu_worker.execution.batch.placed_tokens import Frame
from gpu_worker.execution.batch.step_table import lay_out
from gpu_worker.execution.drafts.drafting import (
    MAX_KEPT_TOKENS,
    ComputedStep,
    Drafting,
    KeptSteps,
    _apart,
    forced_drafts,
)
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.speculative.hidden_vectors.proposer import PendingEntries
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.core import sequences as made
from tests.gpu_worker.plans import batch_sequence, decodes_of
from tests.gpu_worker.structured_output.tiny_tokenizer import VOCAB, constraint_of, tokens_of

HIDDEN_SIZE = 8


def make_sequence(num_tokens: int, **settings: Any) -> BatchSequence:
    return batch_sequence(made.make_sequence(num_tokens, **settings))


def decode_step(sequences: list[BatchSequence], start: int) -> ComputedStep:
    """Return a step that computed the token at `start` of each sequence, and sampled `100 + start` behind it."""
    shares = [Share(sequence, start, 1, True) for sequence in sequences]
    tables = np.zeros((len(sequences), 16), dtype=np.int32)
    hidden = torch.randn(len(sequences), HIDDEN_SIZE)
    sampled = [SampledTokens((100 + start,)) for _ in sequences]
    return ComputedStep(shares, lay_out(decodes_of(shares), sequences, Frame(tables, 4)), hidden, sampled, set())


class FailingProposer:
    """Fails in one of its methods, and counts how often it is called."""

    wants_hidden = True

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.num_calls = 0

    def _called(self, name: str) -> None:
        self.num_calls += 1
        if name == self.failing:
            raise ZeroDivisionError(name)

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        self._called("propose")
        return [Draft((5,)) for _ in requests[self.failing == "count" :]]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        self._called("observe")

    def forget(self, sequence: BatchSequence) -> None:
        self._called("forget")


@pytest.mark.parametrize("failing", ["propose", "count", "observe", "forget"])
def test_proposer_that_fails_is_never_called_again(failing: str) -> None:
    proposer = FailingProposer(failing)
    drafting = Drafting(proposer, vocab_size=50)
    scheduled = [Share(make_sequence(3), 2, 1, True, 1)]
    for _ in range(3):
        drafting.forget([make_sequence(3)])
        drafting.drafts(scheduled)
        drafting.observe(decode_step([make_sequence(3)], 2))
    assert proposer.num_calls == {"propose": 2, "count": 2, "observe": 4, "forget": 1}[failing]
    assert drafting.drafts(scheduled) is None
    assert not drafting.wants_hidden


def test_only_sequences_that_go_on_are_shown() -> None:
    goes_on, failed, departed, unknown = (make_sequence(4) for _ in range(4))
    scheduled = [Share(sequence, 3, 1, True) for sequence in (goes_on, failed, departed)]
    # The step before failed, so the token that this one computed is unknown.
    unknown.has_failed = True
    scheduled.append(Share(unknown, 4, 1, True))
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)
    sampled = [SampledTokens((token,)) for token in range(4)]
    sampled[1] = SampledTokens(error="no numbers")
    hidden = torch.randn(4, HIDDEN_SIZE)
    sequences = [share.sequence for share in scheduled]
    layout = lay_out(decodes_of(scheduled), sequences, Frame(tables, 4))
    step = ComputedStep(scheduled, layout, hidden, sampled, {departed})
    [computed] = step
    assert (computed.sequence, computed.start) == (goes_on, 3)
    assert computed.token_ids == (goes_on.token_ids[3], 0)
    assert torch.equal(computed.hidden, hidden[:1])


class ShownProposer(FailingProposer):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__("")
        self.shown: list[ComputedTokens] = []

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        self.shown += computed


def test_proposer_is_shown_steps_when_it_is_asked() -> None:
    proposer, sequences = ShownProposer(), [make_sequence(4), make_sequence(4)]
    drafting, steps = Drafting(proposer, VOCAB), []
    for start in (3, 4, 5):
        steps.append(decode_step(sequences, start))
        assert drafting.drafts(steps[-1].shares) is None
        drafting.observe(steps[-1])
        for sequence in sequences:
            sequence.token_ids.append(100 + start)
    assert not proposer.shown
    drafting.drafts([Share(sequences[0], 6, 1, True, 1)])
    assert [(item.sequence, item.start) for item in proposer.shown] == [(sequence, 3) for sequence in sequences]
    for place, item in enumerate(proposer.shown):
        assert item.token_ids == (sequences[place].token_ids[3], 103, 104, 105)
        assert torch.equal(item.hidden, torch.stack([step.hidden[place] for step in steps]))


def test_proposer_that_is_never_asked_is_shown_steps_before_they_are_too_many() -> None:
    proposer, sequences = ShownProposer(), [make_sequence(4) for _ in range(MAX_KEPT_TOKENS // 2 + 1)]
    drafting = Drafting(proposer, VOCAB)
    for start in (3, 4, 5):
        step = decode_step(sequences, start)
        drafting.drafts(step.shares)
        drafting.observe(step)
        for sequence in sequences:
            sequence.token_ids.append(100 + start)
    assert [item.token_ids[1:] for item in proposer.shown] == [(103, 104)] * len(sequences)


def test_steps_that_do_not_follow_one_another_are_shown_apart() -> None:
    a, b = make_sequence(9), make_sequence(9)
    kept, steps = KeptSteps(), [decode_step([a, b], 3), decode_step([a, b], 4), decode_step([a, b], 4)]
    for step in (*steps, decode_step([a], 5), decode_step([b, a], 5)):
        kept.add(step)
    shown = [[(item.sequence, item.start, len(item.hidden)) for item in computed] for computed in kept.take()]
    assert shown == [[(a, 3, 2), (b, 3, 2)], [(a, 4, 1), (b, 4, 1)], [(a, 5, 1)], [(b, 5, 1), (a, 5, 1)]]
    assert kept.take() == []


def test_nothing_is_shown_of_sequences_that_left_before_the_proposer_was_asked() -> None:
    proposer, stays, leaves = ShownProposer(), make_sequence(9), make_sequence(9)
    drafting = Drafting(proposer, VOCAB)
    drafting.observe(decode_step([stays, leaves], 3))
    drafting.observe(decode_step([stays, leaves], 4))
    # One that was preempted may come back at once, as if it were new.
    drafting.forget([leaves])
    drafting.observe(decode_step([stays, leaves], 5))
    drafting.drafts([Share(stays, 6, 1, True, 1)])
    shown = [(item.sequence, item.start, len(item.hidden)) for item in proposer.shown]
    assert shown == [(stays, 3, 2), (stays, 5, 1), (leaves, 5, 1)]


def test_rows_of_few_tokens_do_not_keep_the_whole_step() -> None:
    hidden = torch.randn(512, HIDDEN_SIZE)
    places = [[3], [], [7, 9], list(range(20, 400)), [511]]
    parts = _apart(hidden, places)
    assert all(torch.equal(part, hidden[where]) for part, where in zip(parts, places, strict=True))
    kept = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in (parts[0], parts[2], parts[4])
    }
    assert sum(kept.values()) == 4 * HIDDEN_SIZE * 4


def test_entry_that_is_left_of_a_prompt_does_not_keep_it() -> None:
    sequence = make_sequence(101)
    pending = PendingEntries(sequence)
    pending.add(ComputedTokens(sequence, 0, (*sequence.token_ids, 1), torch.randn(101, HIDDEN_SIZE)))
    pending.take(100)
    [left] = pending._chunks
    assert left.untyped_storage().nbytes() == HIDDEN_SIZE * 4


class FixedProposer(FailingProposer):
    """Always proposes the same."""

    def __init__(self, draft: Draft) -> None:
        super().__init__("")
        self.draft = draft

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        return [self.draft for _ in requests]


def guided_decode(source: str, output: str, num_draft_tokens: int, *, is_forced: bool = False) -> Share:
    """Return the next decode of a sequence whose output has to match a regular expression."""
    sampling = Sampling(grammar=Grammar(kind="regex", source=source), temperature=0.0)
    sequence = make_sequence(3, emitted=tokens_of(output))
    sequence.constraint = constraint_of(sampling, tokens_of(output))
    forced = tuple(sequence.constraint.forced_tokens()[:num_draft_tokens]) if is_forced else ()
    return Share(sequence, len(sequence.token_ids) - 1, 1, True, num_draft_tokens, forced)


def test_what_a_proposer_makes_up_is_cut_to_tokens_of_the_vocabulary_and_to_what_was_asked_for() -> None:
    item = Share(make_sequence(3), 2, 1, True, 3)
    for made_up, usable in (
        (Draft((5, 49, 50, 6)), Draft((5, 49))),
        (Draft((5, -1, 6)), Draft((5,))),
        (Draft((5, 6, 7, 8)), Draft((5, 6, 7))),
    ):
        assert Drafting(FixedProposer(made_up), 50).drafts([item]) == [usable]
    assert Drafting(FixedProposer(Draft((50,))), 50).drafts([item]) is None


def test_drafts_that_the_grammar_forbids_are_cut() -> None:
    a, b, c, x = tokens_of("abcx")
    item = guided_decode("a+b?c", "a", 6)
    chain = Drafting(FixedProposer(Draft((a, b, x, c))), VOCAB).drafts([item])
    assert chain == [Draft((a, b))]
    assert Drafting(FixedProposer(Draft((x,))), VOCAB).drafts([item]) is None


def test_forced_tokens_are_drafted_without_asking_the_proposer() -> None:
    items = [guided_decode("abcd|xy", "a", 2, is_forced=True), guided_decode("[ab]+", "a", 2)]
    drafting = Drafting(FixedProposer(Draft(tokens_of("bb"))), VOCAB)
    forced = forced_drafts(items, 63)
    assert forced == [Draft(tokens_of("bc")), Draft()]
    assert forced_drafts(items, 1) == [Draft(tokens_of("b")), Draft()]
    assert drafting.drafts(items, forced) == [Draft(tokens_of("bc")), Draft(tokens_of("bb"))]
    failing = Drafting(FailingProposer("propose"), VOCAB)
    assert failing.drafts(items, forced_drafts(items, 63)) == [Draft(tokens_of("bc")), Draft()]
