"""Which tokens of a sequence with a budget are kept, worked out token by token: the oracle of evictions."""


def kept_tokens(place: int, num_tokens: int, num_sinks: int, num_evicted: int) -> list[int]:
    """Return which tokens are kept when the one at `place` is computed, itself the last; all sizes in tokens."""
    kept: list[int] = []
    for token in range(place + 1):
        if len(kept) == num_tokens:
            kept = kept[:num_sinks] + kept[num_sinks + num_evicted :]
        kept.append(token)
    return kept
