"""Draft tokens."""

from __future__ import annotations

from gpu_worker.core.draft import MAX_DRAFT_TOKENS, Draft

VOCAB = 5


def test_draft_ends_before_the_first_token_that_cannot_be_one() -> None:
    assert Draft((1, VOCAB, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, -1, 1)).valid(VOCAB) == Draft((1,))
    assert len(Draft((1,) * 100).valid(VOCAB)) == MAX_DRAFT_TOKENS


def test_tokens_are_accepted_up_to_the_first_that_was_not_sampled() -> None:
    draft = Draft((1, 2, 3))
    for sampled, num_accepted in (((1, 2, 3, 4), 3), ((1, 2, 4, 3), 2), ((0, 2, 3, 4), 0)):
        assert draft.num_accepted(sampled) == num_accepted
    assert Draft().num_accepted((5,)) == 0


def test_each_row_is_sampled_behind_the_drafts_before_it() -> None:
    assert Draft((1, 2)).paths() == [(), (1,), (1, 2)]
