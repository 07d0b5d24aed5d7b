"""Trees of draft tokens, against walking them."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.core.draft import MAX_DRAFT_TOKENS, ROOT, Draft

VOCAB = 5


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, MAX_DRAFT_TOKENS))
    tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count))
    return Draft(tokens, tuple(draw(st.integers(ROOT, number - 1)) for number in range(count)))


def ancestors(draft: Draft, number: int) -> list[int]:
    """The draft tokens from the first to this one."""
    assert draft.parents is not None
    path = []
    while number != ROOT:
        path.append(number)
        number = draft.parents[number]
    return path[::-1]


@given(trees())
def test_paths_depths_and_masks_follow_the_parents(draft: Draft) -> None:
    assert draft.paths() == [(), *(tuple(draft.token_ids[g] for g in ancestors(draft, i)) for i in range(len(draft)))]
    assert draft.depths() == tuple(len(ancestors(draft, number)) for number in range(len(draft)))
    for row, mask in enumerate(draft.masks()):
        assert -(1 << 63) <= mask < 1 << 63
        seen = {0, *(number + 1 for number in ancestors(draft, row - 1))} if row else {0}
        assert {row - bit for bit in range(64) if mask >> bit & 1} == seen | {-age for age in range(1, 64 - row)}


@given(trees(), st.data())
def test_accepted_tokens_are_the_way_that_sampling_took(draft: Draft, data: st.DataObject) -> None:
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


@given(trees(), st.integers(0, MAX_DRAFT_TOKENS + 1))
def test_first_draft_tokens_are_a_tree(draft: Draft, count: int) -> None:
    first = draft.first(count)
    assert len(first) == min(count, len(draft))
    assert first.depths() == draft.depths()[:count]
    assert first.valid(VOCAB) == first


def test_draft_ends_before_the_first_token_that_cannot_be_one() -> None:
    assert Draft((1, VOCAB, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, -1, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, 2, 3), (-1, 1, 0)).valid(VOCAB) == Draft((1,), (-1,))
    assert Draft((1, 2, 3), (-1, 0, -2)).valid(VOCAB) == Draft((1, 2), (-1, 0))
    assert Draft((1, 2, 3), (-1, 0)).valid(VOCAB) == Draft()
    assert len(Draft((1,) * 100).valid(VOCAB)) == MAX_DRAFT_TOKENS


def test_chain_of_a_tree_follows_the_first_tokens() -> None:
    assert Draft((1, 2, 3, 4, 0), (-1, -1, 0, 0, 2)).chain() == Draft((1, 3, 0))


@given(trees(), st.randoms())
def test_kept_draft_tokens_are_those_whose_way_is_kept(draft: Draft, random: Random) -> None:
    is_kept = [random.random() < 0.7 for _ in draft.token_ids]
    left = draft.only(is_kept)
    ways = [path for number, path in enumerate(draft.paths()[1:]) if all(is_kept[n] for n in ancestors(draft, number))]
    assert left.paths()[1:] == ways
    assert left.valid(VOCAB) == left


def test_chain_is_kept_up_to_the_first_that_is_not() -> None:
    assert Draft((1, 2, 3)).only([True, False, True]) == Draft((1,))
    assert Draft((1, 2)).only([True, True]) == Draft((1, 2))
    assert Draft().only([]) == Draft()
