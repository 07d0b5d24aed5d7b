from collections.abc import Sequence as Values

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.prefix_cache import PrefixCache
from gpu_worker.core.sequence import Sequence
from tests.gpu_worker.core.sequences import make_sequence

BLOCK = 4


def computed(cache: PrefixCache, pool: BlockPool, sequence: Sequence) -> Sequence:
    """The sequence after all its tokens were computed and published."""
    sequence.block_table = pool.allocate(-(-sequence.num_tokens // BLOCK))
    cache.publish([(sequence, sequence.num_tokens)])
    return sequence


def test_known_prefix_is_found_in_full_blocks_and_stops_at_the_first_difference() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    holder = computed(cache, pool, make_sequence(range(1, 15)))
    assert cache.match(make_sequence(range(1, 15))) == holder.block_table[:3]
    assert cache.match(make_sequence([*range(1, 8), 99, *range(9, 15)])) == holder.block_table[:1]
    assert cache.match(make_sequence([99, *range(2, 15)])) == []


def test_same_tokens_after_a_different_prefix_are_not_a_hit() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    computed(cache, pool, make_sequence([1, 2, 3, 4, 5, 6, 7, 8]))
    assert cache.match(make_sequence([5, 6, 7, 8, 9])) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    holder = computed(cache, pool, make_sequence(range(1, 9)))
    assert cache.match(make_sequence(range(1, 9))) == holder.block_table[:1]
    assert cache.match(make_sequence(range(1, 10))) == holder.block_table[:2]


def test_another_tenant_finds_nothing() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    computed(cache, pool, make_sequence(range(1, 10), salt=b"a"))
    assert cache.match(make_sequence(range(1, 10), salt=b"b")) == []
    assert len(cache.match(make_sequence(range(1, 10), salt=b"a"))) == 2


def test_sequence_that_wants_prompt_logprobs_matches_nothing() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    computed(cache, pool, make_sequence(range(1, 10)))
    assert cache.match(make_sequence(range(1, 10), prompt_logprobs=0)) == []


def test_miss_costs_one_digest_and_nothing_is_hashed_twice() -> None:
    pool = BlockPool(300)
    cache = PrefixCache(pool, BLOCK)
    sequence = make_sequence(1000)
    assert cache.match(sequence) == []
    assert len(sequence.block_digests) == 1
    computed(cache, pool, sequence)
    digests = list(sequence.block_digests)
    assert len(digests) == 250
    sequence.num_findable_blocks = 250
    cache.publish([(sequence, sequence.num_tokens)])
    assert all(before is after for before, after in zip(digests, sequence.block_digests, strict=True))


def test_content_that_filled_up_gradually_equals_content_hashed_at_once() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, BLOCK)
    sequence = make_sequence([1, 2, 3])
    sequence.block_table = pool.allocate(3)
    for token_id in range(4, 11):
        cache.publish([(sequence, sequence.num_tokens)])
        sequence.token_ids.append(token_id)
    assert cache.match(make_sequence(range(1, 11))) == sequence.block_table[:2]


class BlocksBehindWhichAGroupGoesOn:
    """A group that can go on behind these numbers of blocks."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed

    def resumable(self, digests: Values[bytes], num_blocks: int) -> int:
        return max(number for number in self.allowed if number <= num_blocks)


def test_prefix_is_gone_on_behind_where_all_groups_can() -> None:
    # What the second group leaves, the first one cannot go on behind, and so on.
    rules = BlocksBehindWhichAGroupGoesOn(0, 2, 5, 8), BlocksBehindWhichAGroupGoesOn(0, 2, 4, 6)
    assert PrefixCache(BlockPool(1), BLOCK, rules).num_resumable(make_sequence(40), 9) == 2
