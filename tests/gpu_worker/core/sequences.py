"""Makes sequences for scheduler tests."""

from collections.abc import Iterable
from itertools import chain, count

from gpu_worker.core.block_budget import BlockBudget, BlockScores
from gpu_worker.core.sequence import Sequence
from shared.cache_hints import CacheHints
from shared.messages import Lane
from shared.sampling import Sampling

EOS = 0
_numbers = count()


def make_sequence(
    prompt: Iterable[int] | int,
    *,
    id: str | None = None,
    emitted: Iterable[int] = (),
    max_tokens: int = 8,
    lane: Lane = "interactive",
    priority: int = 0,
    arrival: float | None = None,
    deadline: float | None = None,
    tenant: str = "",
    key: str = "",
    weight: float = 1.0,
    salt: bytes = b"tenant",
    hints: CacheHints | None = None,
    **sampling: object,
) -> Sequence:
    """A sequence; an integer as prompt stands for that many tokens that no other sequence shares."""
    number = next(_numbers)
    tokens = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(
        id=id or f"sequence-{number}",
        token_ids=[*tokens, *emitted],
        num_prompt_tokens=len(tokens),
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        eos_token_ids=frozenset([EOS]),
        lane=lane,
        priority=priority,
        arrival=float(number) if arrival is None else arrival,
        deadline=deadline,
        tenant=tenant,
        key=key,
        weight=weight,
        salt=salt,
        hints=hints,
    )


def limit(sequence: Sequence, budget: BlockBudget, decisions: Iterable[tuple[int, ...]] = ()) -> Sequence:
    """Give a sequence a budget, and return it; an attempt before has made the decisions."""
    sequence.budget = budget
    sequence.scores = BlockScores(budget, list(chain.from_iterable(decisions))) if budget.is_scored else None
    return sequence


def kept_tokens(
    place: int, num_tokens: int, num_sinks: int, num_evicted: int, decisions: Iterable[tuple[int, ...]] | None = None
) -> list[int]:
    """Return which tokens are kept when the one at `place` is computed, itself the last; all sizes in tokens.

    `decisions` are the places of the blocks that leave, eviction by eviction; without, those behind the sinks leave.
    """
    kept: list[int] = []
    coming = None if decisions is None else iter(decisions)
    for token in range(place + 1):
        if len(kept) == num_tokens:
            gone = set(range(num_sinks, num_sinks + num_evicted))
            if coming is not None:
                places = next(coming)
                size = num_evicted // len(places)
                gone = {block * size + offset for block in places for offset in range(size)}
            kept = [each for index, each in enumerate(kept) if index not in gone]
        kept.append(token)
    return kept
