"""Trees of the draft tokens that are most likely to be accepted, those before them considered.

The likeliest chain is numbered first: where it is accepted, nothing has to be moved in the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values

from gpu_worker.core.draft import ROOT, Draft


class BranchingChain:
    """Grows a chain, and beside each token of it the other candidates of that depth, which nothing follows."""

    def __init__(self, max_tokens: int, least_chance: float) -> None:
        """Draft at most `max_tokens`, while the chain's probability is `least_chance` or more."""
        self._max_tokens = max_tokens
        self._least = math.log(least_chance)
        self._depth = 0
        self._chain = 0.0
        # Less the joint log probability, depth, rank there, token.
        self._candidates: list[tuple[float, int, int, int]] = []

    def grow(self, token_ids: Values[int], log_probabilities: Values[float]) -> bool:
        """Add the candidates of the next depth, likeliest first; return whether the next depth is worth computing."""
        for rank, (token_id, score) in enumerate(zip(token_ids, log_probabilities, strict=True)):
            self._candidates.append((-self._chain - score, self._depth, rank, token_id))
        self._candidates.sort()
        del self._candidates[self._max_tokens :]
        self._chain += log_probabilities[0]
        self._depth += 1
        if self._depth >= self._max_tokens or self._chain < self._least:
            return False
        return len(self._candidates) < self._max_tokens or -self._candidates[-1][0] < self._chain

    def draft(self) -> Draft:
        """Return the likeliest draft tokens."""
        chain = {depth: number for number, (_, depth, rank, _) in enumerate(self._candidates) if rank == 0}
        parents = [ROOT if depth == 0 else chain[depth - 1] for _, depth, _, _ in self._candidates]
        return _numbered([token_id for _, _, _, token_id in self._candidates], parents)


def _numbered(token_ids: list[int], parents: list[int]) -> Draft:
    chain: list[int] = []
    for number, parent in enumerate(parents):
        if parent == (chain[-1] if chain else ROOT):
            chain.append(number)
    if len(chain) == len(parents):
        return Draft(tuple(token_ids))
    in_chain = set(chain)
    order = chain + [number for number in range(len(parents)) if number not in in_chain]
    numbers = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
    return Draft(tuple(token_ids[old] for old in order), tuple(numbers[parents[old]] for old in order))
