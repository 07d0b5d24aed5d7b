"""Trees of guesses, against walking them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.core.draft import MAX_GUESSES, ROOT, Draft

VOCAB = 5


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, MAX_GUESSES))
    tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count))
    return Draft(tokens, tuple(draw(st.integers(ROOT, guess - 1)) for guess in range(count)))


def ancestors(draft: Draft, guess: int) -> list[int]:
    """The guesses from the first to this one."""
    assert draft.parents is not None
    path = []
    while guess != ROOT:
        path.append(guess)
        guess = draft.parents[guess]
    return path[::-1]


@given(trees())
def test_paths_depths_and_masks_follow_the_parents(draft: Draft) -> None:
    assert draft.paths() == [(), *(tuple(draft.token_ids[g] for g in ancestors(draft, i)) for i in range(len(draft)))]
    assert draft.depths() == tuple(len(ancestors(draft, guess)) for guess in range(len(draft)))
    for row, mask in enumerate(draft.masks()):
        assert -(1 << 63) <= mask < 1 << 63
        seen = {0, *(guess + 1 for guess in ancestors(draft, row - 1))} if row else {0}
        assert {row - bit for bit in range(64) if mask >> bit & 1} == seen | {-age for age in range(1, 64 - row)}


@given(trees(), st.data())
def test_accepted_guesses_are_the_way_that_sampling_took(draft: Draft, data: st.DataObject) -> None:
    sampled = [data.draw(st.integers(0, VOCAB - 1)) for _ in range(len(draft) + 1)]
    assert draft.parents is not None
    here, way = ROOT, []
    while True:
        following = [g for g, p in enumerate(draft.parents) if p == here and draft.token_ids[g] == sampled[here + 1]]
        if not following:
            break
        here = following[0]
        way.append(here)
    assert draft.accepted(sampled) == tuple(way)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=9), st.lists(st.integers(0, VOCAB - 1), min_size=10, max_size=10))
def test_a_chain_is_the_tree_of_one_way(tokens: list[int], sampled: list[int]) -> None:
    chain, tree = Draft(tuple(tokens)), Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
    assert chain.depths() == tree.depths()
    assert chain.paths() == tree.paths()
    assert chain.masks() == tree.masks()
    assert chain.accepted(sampled) == tree.accepted(sampled)
    assert tree.chain() == chain == chain.chain()


@given(trees(), st.integers(0, MAX_GUESSES + 1))
def test_first_guesses_are_a_tree(draft: Draft, count: int) -> None:
    first = draft.first(count)
    assert len(first) == min(count, len(draft))
    assert first.depths() == draft.depths()[:count]
    assert first.valid(VOCAB) == first


def test_guesses_end_before_the_first_that_cannot_be_one() -> None:
    assert Draft((1, VOCAB, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, -1, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, 2, 3), (-1, 1, 0)).valid(VOCAB) == Draft((1,), (-1,))
    assert Draft((1, 2, 3), (-1, 0, -2)).valid(VOCAB) == Draft((1, 2), (-1, 0))
    assert Draft((1, 2, 3), (-1, 0)).valid(VOCAB) == Draft()
    assert len(Draft((1,) * 100).valid(VOCAB)) == MAX_GUESSES


def test_chain_of_a_tree_follows_first_guesses() -> None:
    assert Draft((1, 2, 3, 4, 0), (-1, -1, 0, 0, 2)).chain() == Draft((1, 3, 0))
