"""What hints of conversations do to the prefix cache of a whole scheduler, in driven time."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.core.block_hints import BlockHints
from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.retention import Retention
from gpu_worker.core.scheduler_config import StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sessions import Sessions
from shared.cache_hints import CacheHints
from shared.messages import Lane
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.oracle_tiers import OracleTiers
from tests.gpu_worker.core.sequences import make_sequence

SHARED = [3] * 8
LONG = [5] * 24


def run(harness: Harness, prompt: list[int], hints: CacheHints | None = None, **more: Any) -> int:
    """Compute a request, and return how many tokens of its prompt were cached."""
    harness.add(sequence := make_sequence(prompt, hints=hints, max_tokens=1, ignore_eos=True, **more))
    harness.run_to_reference(sequence)
    return sequence.num_cached_tokens


def evict(harness: Harness, num_cached: int) -> None:
    """Overwrite all blocks that hold nothing, and so many of those that can be found."""
    pool = harness.scheduler._blocks.pool
    pool.release(pool.allocate(pool.num_blank + num_cached))


def cached(harness: Harness, prompt: list[int], salt: bytes = b"tenant") -> int:
    """Return how many blocks of a prompt are found."""
    return harness.scheduler._blocks.num_hits(make_sequence(prompt, salt=salt))


@pytest.mark.parametrize("lane", ["interactive", "batch"])
def test_a_prefix_stays_for_as_long_as_it_is_retained(lane: Lane) -> None:
    harness = Harness(num_blocks=16)
    run(harness, LONG, CacheHints(retain_s=60), lane=lane)
    run(harness, [6] * 24)
    evict(harness, 6)
    assert (cached(harness, LONG), cached(harness, [6] * 24)) == (5, 0)
    harness.now = 61.0
    run(harness, [6] * 24)
    run(harness, [6] * 24)
    evict(harness, 6)
    assert (cached(harness, LONG), cached(harness, [6] * 24)) == (0, 5)


def test_without_hints_a_prefix_goes_with_the_others() -> None:
    harness = Harness(num_blocks=16)
    run(harness, LONG)
    run(harness, [6] * 24)
    evict(harness, 6)
    assert (cached(harness, LONG), cached(harness, [6] * 24)) == (0, 5)


def test_what_is_dropped_is_not_retained_too() -> None:
    harness = Harness(num_blocks=16)
    run(harness, LONG, CacheHints(session_id="s", retain_s=60, drop=True))
    assert len(harness.scheduler._blocks.pool.order.retention) == 0


def test_a_state_is_retained_no_longer_than_its_blocks() -> None:
    harness = Harness(num_blocks=24, state=StateConfig(8, 1))
    run(harness, LONG, CacheHints(retain_s=60))
    states = harness.scheduler._blocks.states
    assert states is not None
    assert len(states.retention) > 0
    harness.now = 61.0
    run(harness, [6] * 24)
    assert len(states.retention) == 0


def test_what_is_retained_stops_nobody() -> None:
    harness = Harness(num_blocks=16)
    run(harness, LONG, CacheHints(retain_s=60))
    assert run(harness, make_sequence(60).token_ids) == 0


def test_a_tenant_retains_no_more_than_its_quota_once_another_asks() -> None:
    harness = Harness(num_blocks=16)
    run(harness, [1] * 36, CacheHints(retain_s=60), tenant="a", salt=b"a")
    run(harness, [2] * 36, CacheHints(retain_s=60), tenant="b", salt=b"b", weight=3.0)
    evict(harness, 8)
    # Half of 16 blocks may be retained.
    assert (cached(harness, [1] * 36, b"a"), cached(harness, [2] * 36, b"b")) == (2, 6)


@pytest.mark.parametrize("windows", [(), (WindowConfig(9, 16),)])
@pytest.mark.parametrize("state", [None, StateConfig(8, 1)])
def test_blocks_of_a_conversation_that_is_over_go_first(
    windows: tuple[WindowConfig, ...], state: StateConfig | None
) -> None:
    harness = Harness(num_blocks=24, windows=windows, state=state)
    run(harness, LONG, CacheHints(session_id="s", retain_s=60))
    run(harness, [6] * 24)
    run(harness, [*LONG, 9, 9, 9], CacheHints(session_id="s", drop=True))
    evict(harness, 6)
    assert cached(harness, LONG) == 0
    assert cached(harness, [6] * 24) > 0


def test_what_other_conversations_use_is_not_dropped() -> None:
    harness = Harness(num_blocks=24)
    ending = CacheHints(session_id="s", drop=True)
    run(harness, [*SHARED, *[6] * 8], CacheHints(session_id="s"))
    run(harness, [*SHARED, *[7] * 8])
    run(harness, [*SHARED, *[6] * 9], ending)
    evict(harness, 2)
    assert cached(harness, [*SHARED, *[6] * 8]) == len(SHARED) // BLOCK
    assert cached(harness, [*SHARED, *[7] * 8]) == 3


def test_what_two_conversations_compute_at_once_is_of_none() -> None:
    harness = Harness(num_blocks=32, max_num_batched_tokens=64)
    pair = [
        make_sequence([*SHARED, number, *[number] * 8], max_tokens=1, hints=CacheHints(session_id=str(number)))
        for number in (6, 7)
    ]
    harness.add(*pair)
    harness.run()
    run(harness, [*SHARED, 6, *[6] * 9], CacheHints(session_id="6", drop=True))
    evict(harness, 2)
    assert cached(harness, [*SHARED, 7, 7, 7, 7, 7]) == 3
    assert cached(harness, [*SHARED, 6, 6, 6, 6, 6]) == len(SHARED) // BLOCK


def test_one_request_that_is_dropped_leaves_what_it_found() -> None:
    harness = Harness(num_blocks=24)
    run(harness, [*SHARED, 1])
    run(harness, [*SHARED, *[6] * 9], CacheHints(drop=True))
    run(harness, [7] * 9)
    evict(harness, 2)
    assert cached(harness, [*SHARED, *[6] * 9]) == len(SHARED) // BLOCK


def test_a_state_that_supersedes_another_lets_what_lies_behind_the_common_part_go_first() -> None:
    harness = Harness(num_blocks=24)
    old, new = [*SHARED, *[6] * 24, 1], [*SHARED, *[7] * 4, 1]
    run(harness, old, CacheHints(session_id="s", retain_s=60))
    run(harness, [8] * 24)
    run(harness, new, CacheHints(session_id="s", supersedes=True))
    evict(harness, 6)
    assert (cached(harness, old), cached(harness, new), cached(harness, [8] * 24)) == (2, 3, 5)


def test_a_branch_that_supersedes_nothing_leaves_the_other() -> None:
    harness = Harness(num_blocks=24)
    run(harness, [*SHARED, *[6] * 8, 1], CacheHints(session_id="s"))
    run(harness, [*SHARED, *[7] * 8, 1], CacheHints(session_id="s"))
    assert (cached(harness, [*SHARED, *[6] * 8, 1]), cached(harness, [*SHARED, *[7] * 8, 1])) == (4, 4)


def test_tiers_are_told_of_the_whole_conversation() -> None:
    tiers = OracleTiers(1, 0)
    tiers.random.random = lambda: 0.5  # type: ignore[method-assign]
    harness = Harness(num_blocks=24, tiers=tiers)
    tiers.runner = harness.runner
    harness.now = 5.0
    run(harness, LONG, CacheHints(session_id="s", retain_s=60))
    assert list(tiers.retained.values()) == [65.0] * 6
    run(harness, [*LONG, 9, 9, 9, 9], CacheHints(session_id="s", drop=True))
    assert len(tiers.spent) == 7


class Touched(bytes):
    """A digest that counts how often any of them is looked up."""

    count = 0

    def __hash__(self) -> int:
        Touched.count += 1
        return super().__hash__()


def test_no_step_pays_for_all_that_a_conversation_owns() -> None:
    tiers = OracleTiers(1, 0)
    pool = BlockPool(2000, retained_share=0.5)
    hints = BlockHints([pool], None, tiers)
    owner = make_sequence([1], hints=CacheHints(session_id="s"))
    digests = [Touched(b"%d" % number) for number in range(40_000)]
    for place, digest in enumerate(digests):
        hints.sessions.computed(owner, [digest])
        # What is evicted stays owned.
        if place < 1000:
            (block,) = pool.allocate(1)
            pool.label(block, digest)
            pool.release([block])
    newer = [make_sequence([1], hints=CacheHints(session_id="s", supersedes=True)) for _ in range(128)]
    touched: list[int] = []
    for act in (lambda each: hints.start(each, 0), lambda each: hints.end(each, 0, 0.0)):
        Touched.count = 0
        for sequence in newer:
            act(sequence)
        touched.append(Touched.count)
        hints.expire(0.0)
    while len(hints.sessions):
        Touched.count = 0
        hints.expire(0.0)
        touched.append(Touched.count)
    assert max(touched) < 100_000
    assert sum(touched) < 20 * len(digests)
    assert tiers.spent == set(digests)


def test_what_a_step_leaves_of_a_conversation_goes_in_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.core.block_hints.MAX_DIGESTS_A_STEP", 2)
    harness = Harness(num_blocks=24)
    run(harness, LONG, CacheHints(session_id="s", retain_s=60))
    run(harness, [6] * 24)
    run(harness, [*LONG, 9, 9, 9], CacheHints(session_id="s", drop=True))
    for _ in range(3):
        run(harness, [8] * 2)
    evict(harness, 6)
    assert (cached(harness, LONG), cached(harness, [6] * 24)) == (0, 5)


def test_a_long_prefix_is_retained_over_several_steps_and_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    pool = BlockPool(200)
    pool.order.retention = Retention(100)

    def counted(tenant: str, weight: float, digests: list[bytes], until: float) -> None:
        asked.append(len(digests))
        pool.order.retain(tenant, weight, digests, until)

    monkeypatch.setattr(pool, "retain", counted)
    monkeypatch.setattr("gpu_worker.core.block_hints.CHUNK", 10)
    monkeypatch.setattr("gpu_worker.core.block_hints.MAX_DIGESTS_A_STEP", 40)
    hints = BlockHints([pool], None, None)
    prefix = [b"%d" % number for number in range(90)]
    for number in range(128):
        choice = make_sequence([1], hints=CacheHints(retain_s=60))
        choice.block_digests = [*prefix, b"choice %d" % number]
        hints.end(choice, 91, 0.0)
    assert sum(asked) == len(pool.order.retention) == 40
    num_steps = 0
    while hints._retaining:
        asked.clear()
        hints.expire(0.5)
        assert sum(asked) <= 40 + 10
        num_steps += 1
    assert [digest in pool.order.retention for digest in prefix] == [True] * 90
    assert num_steps < 128


@pytest.mark.parametrize("hint", [CacheHints(session_id="s", drop=True), CacheHints(session_id="s", supersedes=True)])
def test_what_is_dropped_leaves_the_queue_of_what_is_to_be_retained(
    hint: CacheHints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.core.block_hints.CHUNK", 10)
    monkeypatch.setattr("gpu_worker.core.block_hints.MAX_DIGESTS_A_STEP", 40)
    tiers, pool = OracleTiers(1, 0), BlockPool(400, retained_share=1.0)
    hints = BlockHints([pool], None, tiers)
    digests = [b"%d" % number for number in range(200)]
    blocks = pool.allocate(200)
    for block, digest in zip(blocks, digests, strict=True):
        pool.label(block, digest)
    pool.release(blocks)
    shared, own = digests[:35], digests[35:]
    first = make_sequence([1], hints=CacheHints(session_id="s", retain_s=60))
    first.block_digests = digests
    hints.sessions.computed(first, digests)
    # Another conversation begins like this one.
    hints.sessions.starts_behind(make_sequence([1]), shared)
    hints.end(first, 200, 0.0)
    last = make_sequence([1], hints=hint)
    last.block_digests = shared
    hints.start(last, 35)
    hints.end(last, 35, 0.0)
    # A third one finds ten that are spent, and has them retained from then on.
    while own[9] in hints.sessions._owners:
        hints.expire(0.0)
    later = make_sequence([1], hints=CacheHints(session_id="t", retain_s=30))
    later.block_digests = digests[:45]
    hints.start(later, 45)
    hints.end(later, 45, 0.0)
    while hints._retaining or hints.sessions._over:
        hints.expire(0.0)
    assert [digest for digest in digests if digest in pool.order.retention] == digests[:45]
    assert tiers.retained.keys() == set(digests[:45])
    assert list(pool.order)[:155] == list(reversed(own[10:]))


def test_what_came_to_the_tiers_after_a_choice_has_ended_is_retained_by_the_next() -> None:
    tiers, pool = OracleTiers(1, 0), BlockPool(20, retained_share=1.0)
    hints = BlockHints([pool], None, tiers)
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, (b"a", b"b"), strict=True):
        pool.label(block, digest)
    for _ in range(2):
        tiers.retained.clear()
        choice = make_sequence([1], hints=CacheHints(retain_s=60))
        choice.block_digests = [b"a", b"b"]
        hints.end(choice, 2, 0.5)
        assert tiers.retained == {b"a": 60.5, b"b": 60.5}


def test_what_is_used_again_is_spent_again_and_what_another_uses_first_is_not() -> None:
    sessions = Sessions()
    own, other = (make_sequence([1], hints=CacheHints(session_id=name)) for name in "st")
    sessions.computed(own, [b"a", b"b", b"c"])
    assert sessions.spend(own, [b"a"], 9) == [b"b", b"c"]
    assert sessions.spend(own, [b"a"], 9) == []
    sessions.starts_behind(own, [b"a", b"b"])
    assert sessions.spend(own, [], 9) == [b"a", b"b"]
    sessions.end(own, [b"a"])
    sessions.starts_behind(other, [b"b"])
    sessions.computed(own, [b"d"])
    assert sessions.pop_outdated(9) == [b"c"]
    assert sessions.spend(own, [], 9) == [b"a", b"d"]


def test_a_tenant_has_half_of_the_digests_at_most_and_keeps_the_newest() -> None:
    sessions = Sessions(max_digests=10)
    sequence = make_sequence([1], hints=CacheHints(session_id="s"))
    names = [b"%d" % number for number in range(20)]
    for name in names:
        sessions.computed(sequence, [name])
    assert sessions.spend(sequence, (), 20) == names[-5:]


def test_conversations_are_forgotten_where_there_are_too_many_those_of_the_largest_tenant_first() -> None:
    sessions = Sessions(max_digests=10)

    def session(tenant: str, name: str) -> Sequence:
        return make_sequence([1], tenant=tenant, salt=tenant.encode(), hints=CacheHints(session_id=name))

    small = session("small", "s")
    sessions.computed(small, [b"x", b"y"])
    for number in range(20):
        sessions.computed(session("large", str(number)), [f"{number}-{part}".encode() for part in range(4)])
        # Nothing is kept of conversations that own nothing.
        sessions.computed(session("empty", str(number)), [])
    assert len(sessions) <= 10
    assert sessions.spend(small, (), 10) == [b"x", b"y"]
    assert sessions.spend(session("large", "0"), (), 10) == []
    assert sessions._tenants.keys() == {"small", "large"}
