"""Trees of guesses where what is likely at a depth does not depend on the guesses before it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Values

from gpu_worker.speculative.draft import ROOT, Draft


def likeliest_tree(token_ids: Values[Values[int]], log_probabilities: Values[Values[float]], count: int) -> Draft:
    """Return the `count` guesses that are likeliest to become tokens, those before them considered.

    The likeliest chain is numbered first: where it is right, nothing has to be moved in the KV cache.

    Args:
        token_ids: By depth, candidates, likely ones first.
        log_probabilities: Theirs.
        count: Guesses at most.
    """
    taken: list[tuple[int, int, int]] = []
    # Less the joint log probability, the guess that it follows, depth, and rank there.
    open_guesses = [(-log_probabilities[0][0], ROOT, 0, 0)]
    while open_guesses and len(taken) < count:
        cost, parent, depth, rank = heapq.heappop(open_guesses)
        scores = log_probabilities[depth]
        if rank + 1 < len(scores):
            heapq.heappush(open_guesses, (cost + scores[rank] - scores[rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(token_ids):
            heapq.heappush(open_guesses, (cost - log_probabilities[depth + 1][0], len(taken), depth + 1, 0))
        taken.append((parent, depth, rank))
    return _numbered([token_ids[depth][rank] for _, depth, rank in taken], [parent for parent, _, _ in taken])


def _numbered(token_ids: list[int], parents: list[int]) -> Draft:
    """Return the draft with its first chain in front."""
    chain: list[int] = []
    for guess, parent in enumerate(parents):
        if parent == (chain[-1] if chain else ROOT):
            chain.append(guess)
    if len(chain) == len(parents):
        return Draft(tuple(token_ids))
    in_chain = set(chain)
    order = chain + [guess for guess in range(len(parents)) if guess not in in_chain]
    numbers = {guess: number for number, guess in enumerate(order)} | {ROOT: ROOT}
    return Draft(tuple(token_ids[guess] for guess in order), tuple(numbers[parents[guess]] for guess in order))
