from __future__ import annotations

import weakref

import torch

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.speculative.medusa.proposer import MedusaProposer
from shared.sampling import Sampling

VOCAB = 50


class CountingHeads:
    """Heads of which `i` expects the number that the hidden vector names, plus `i`; half as much, ten more."""

    num_heads = 3
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        self.asked.append((len(hidden), num_heads))
        logits = torch.full((num_heads, len(hidden), VOCAB), -20.0)
        for head in range(num_heads):
            for row, number in enumerate(hidden[:, 0].int().tolist()):
                logits[head, row, number + head] = 1.0
                logits[head, row, number + head + 10] = 0.0
        return logits


def make_sequence(length: int) -> Sequence:
    return Sequence("s", list(range(length)), length, Sampling(), 100)


def computed(sequence: Sequence, start: int, following: int, numbers: list[int]) -> ComputedTokens:
    """Say that tokens from `start` on left these hidden vectors behind."""
    token_ids = (*sequence.token_ids[start : start + len(numbers)], following)
    return ComputedTokens(sequence, start, token_ids, torch.tensor(numbers)[:, None].float().expand(-1, 4))


def test_drafts_follow_the_token_behind_the_last_hidden_vector() -> None:
    heads = CountingHeads()
    proposer = MedusaProposer(heads)
    first, second = make_sequence(4), make_sequence(6)
    proposer.observe([computed(first, 0, 9, [1, 2, 3, 20]), computed(second, 3, 9, [1, 2, 30])])
    first.token_ids.append(9)
    second.token_ids.append(9)
    drafts = proposer.propose([DraftRequest(first, 1), DraftRequest(second, 5)])
    assert drafts[0] == Draft((20,))
    assert drafts[1].chain().token_ids == (30, 31, 32)
    assert set(drafts[1].paths()[1:]) == {(30,), (40,), (30, 31), (30, 41), (30, 31, 32)}
    assert heads.asked == [(2, 3)]


def test_no_more_heads_are_asked_than_drafts_can_be_deep() -> None:
    heads = CountingHeads()
    proposer = MedusaProposer(heads)
    sequence = make_sequence(1)
    proposer.observe([computed(sequence, 0, 9, [7])])
    sequence.token_ids.append(9)
    proposer.propose([DraftRequest(sequence, 2)])
    assert heads.asked == [(1, 2)]


def test_sequence_whose_end_was_not_computed_gets_no_draft() -> None:
    proposer = MedusaProposer(CountingHeads())
    sequence, unknown, unfinished = make_sequence(3), make_sequence(3), make_sequence(8)
    proposer.observe([computed(sequence, 0, 9, [1, 2, 3]), computed(unfinished, 0, 3, [1, 2, 3])])
    sequence.token_ids += [9, 8]
    assert proposer.propose([DraftRequest(s, 2) for s in (sequence, unknown, unfinished)]) == [NO_DRAFT] * 3
    del sequence.token_ids[-1]
    assert len(proposer.propose([DraftRequest(sequence, 2)])[0]) == 2
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert proposer.propose([DraftRequest(sequence, 2)]) == [NO_DRAFT]


def test_prompt_that_was_computed_for_nothing_but_its_scores_gets_no_draft() -> None:
    proposer = MedusaProposer(CountingHeads())
    sequence = make_sequence(1)
    proposer.observe([ComputedTokens(sequence, 0, (0,), torch.empty(0, 4))])
    assert proposer.propose([DraftRequest(sequence, 2)]) == [NO_DRAFT]


def test_what_is_kept_does_not_grow_while_others_come_and_go() -> None:
    proposer, longest = MedusaProposer(CountingHeads()), make_sequence(3)
    hidden = []
    for _ in range(50):
        other = make_sequence(3)
        step = [computed(longest, 0, 9, [1, 2, 3]), computed(other, 0, 9, [1, 2, 3])]
        hidden += [weakref.ref(item.hidden) for item in step]
        proposer.observe(step)
        proposer.forget(other)
    del step
    assert sum(reference() is not None for reference in hidden) == 1
    longest.token_ids.append(9)
    assert len(proposer.propose([DraftRequest(longest, 2)])[0]) == 2
