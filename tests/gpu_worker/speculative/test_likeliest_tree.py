from __future__ import annotations

import math
import random

import pytest

from gpu_worker.speculative.likeliest_tree import BranchingChain


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
