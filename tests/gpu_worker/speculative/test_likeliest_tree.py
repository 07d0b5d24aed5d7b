from __future__ import annotations

import itertools
import math
import random

import pytest

from gpu_worker.core.draft import Draft
from gpu_worker.speculative.likeliest_tree import BranchingChain, likeliest_tree


def all_paths(token_ids: list[list[int]], scores: list[list[float]]) -> dict[tuple[int, ...], float]:
    """Every combination of candidates, of any depth, with its joint log probability."""
    paths = {}
    for depth in range(1, len(token_ids) + 1):
        for ranks in itertools.product(*(range(len(ids)) for ids in token_ids[:depth])):
            path = tuple(token_ids[level][rank] for level, rank in enumerate(ranks))
            paths[path] = sum(scores[level][rank] for level, rank in enumerate(ranks))
    return paths


@pytest.mark.parametrize("count", [1, 2, 5, 14, 63])
def test_tree_holds_the_likeliest_paths_of_all(count: int) -> None:
    generator = random.Random(count)
    for _ in range(20):
        token_ids = [generator.sample(range(100), 4) for _ in range(3)]
        scores = [sorted((math.log(generator.random()) for _ in range(4)), reverse=True) for _ in range(3)]
        draft = likeliest_tree(token_ids, scores, count)
        expected = sorted(all_paths(token_ids, scores).items(), key=lambda item: -item[1])[:count]
        assert set(draft.paths()[1:]) == {path for path, _ in expected}
        assert draft.valid(100) == draft
        chain = tuple(ids[0] for ids in token_ids)
        assert chain[: len(draft.chain())] == draft.chain().token_ids == draft.token_ids[: len(draft.chain())]


def test_certain_candidates_make_a_chain() -> None:
    assert likeliest_tree([[5, 6], [7, 8]], [[-0.01, -5.0], [-0.01, -5.0]], 2) == Draft((5, 7))


def test_fewer_combinations_than_asked_for_are_all_taken() -> None:
    assert len(likeliest_tree([[5, 6]], [[-0.5, -1.0]], 9)) == 2


@pytest.mark.parametrize("count", [1, 2, 5, 9, 30])
def test_branching_chain_holds_the_likeliest_tokens_that_were_found(count: int) -> None:
    generator = random.Random(count)
    for _ in range(40):
        chain, found = BranchingChain(count, 0.1), {}
        path: tuple[int, ...] = ()
        joint, goes_on = 0.0, True
        while goes_on:
            token_ids = generator.sample(range(100), 4)
            scores = sorted((math.log(generator.random()) for _ in range(4)), reverse=True)
            found |= {(*path, token): joint + score for token, score in zip(token_ids, scores, strict=True)}
            goes_on = chain.grow(token_ids, scores)
            path, joint = (*path, token_ids[0]), joint + scores[0]
            assert not goes_on or joint >= math.log(0.1)
        best = sorted(found.items(), key=lambda item: -item[1])[:count]
        assert set(chain.draft().paths()[1:]) == {path for path, _ in best}
        assert chain.draft().valid(100) == chain.draft()
        # What would have come behind is no likelier than the chain, so it was not worth a look, or could not be in.
        assert len(path) == count or joint < math.log(0.1) or joint <= best[-1][1]
