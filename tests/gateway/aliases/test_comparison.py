"""When a canary counts as worse: the tests against independent counts, and how often chance alone rolls one back."""

from __future__ import annotations

import math
import random
import time
from itertools import combinations
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

from gateway.aliases.comparison import (
    ALPHA,
    LOOK_GROWTH,
    ArmCounts,
    BothArms,
    Buckets,
    fisher,
    look_of,
    mann_whitney,
    reason_to_roll_back,
    verdict_so_far,
)
from gateway.aliases.table import Rules
from shared.messages import UNDECODABLE


def test_fisher_agrees_with_the_lady_tasting_tea() -> None:
    # Fisher 1935: of four cups with milk first she names three, of four others one; 17 of 70 choices are as good.
    assert fisher(1, 4, 3, 4) == pytest.approx(17 / 70)
    assert fisher(0, 4, 4, 4) == pytest.approx(1 / 70)
    assert fisher(0, 10, 0, 10) == 1.0
    # More errors than the second group has answers: of 9, 7 failed, and so did both of the second.
    assert fisher(5, 7, 2, 2) == pytest.approx(21 / 36)


def test_fisher_of_a_million_errors_is_quick_and_near_its_normal_limit() -> None:
    # A million errors of two million requests: the second group's are 500,000 in the mean, with this deviation.
    deviation = math.sqrt(1_000_000 * 0.25 / 2)
    errors = round(500_000 + 2 * deviation)
    began = time.process_time()
    assert fisher(1_000_000 - errors, 1_000_000, errors, 1_000_000) == pytest.approx(NormalDist().cdf(-2), rel=0.02)
    assert time.process_time() - began < 1.0


def test_counts_of_another_process_that_cannot_be_are_refused() -> None:
    good = msgspec.to_builtins(BothArms(ArmCounts(requests=3, errors=1, ttft=Buckets({2: 3}))))
    for fault in ({"requests": -1}, {"errors": 4}, {"ttft": {"counts": {331: 1}}}, {"requests": 2**63}):
        payload = msgspec.msgpack.encode({**good, "stable": {**good["stable"], **fault}})
        with pytest.raises(UNDECODABLE):
            msgspec.msgpack.decode(payload, type=BothArms)
    with pytest.raises(UNDECODABLE):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"canary": {"logprob": math.nan}}), type=BothArms)


def test_verdict_says_what_is_missing() -> None:
    arms, rules = BothArms(), Rules(min_requests=50)
    assert verdict_so_far(arms, rules) == "judged after 50 more requests"
    arms.canary.requests = 80
    assert "the other model has had 0 requests, 20 are needed" in verdict_so_far(arms, rules)
    arms.stable.requests = 80
    assert verdict_so_far(arms, rules).startswith("not worse so far; of too few")
    arms.stable.perplexity = arms.canary.perplexity = Buckets({0: 20})
    assert verdict_so_far(arms, rules) == "not worse so far"


def test_mann_whitney_needs_twenty_values_and_agrees_in_direction_with_the_exact_test() -> None:
    # 16 values without ties: a share of the ways to choose the canary's eight has a rank sum at least as large.
    generator = random.Random(3)
    values = sorted(1.3**n for n in range(40))
    chosen = generator.sample(values, 16)
    canary, stable = chosen[:8], chosen[8:]

    def u(of: tuple[float, ...] | list[float], others: list[float]) -> int:
        return sum(a > b for a in of for b in others)

    own = u(canary, stable)
    ways = [u(way, [x for x in chosen if x not in way]) for way in combinations(chosen, 8)]
    exact = sum(each >= own for each in ways) / len(ways)
    # Eight values are too few for the normal approximation; of each three times, it is on the exact test's side.
    assert mann_whitney(buckets(stable), buckets(canary), 1.0) is None
    many = mann_whitney(buckets(stable * 3), buckets(canary * 3), 1.0)
    assert many is not None
    assert (many < 0.5) == (exact < 0.5)
    assert mann_whitney(Buckets({0: 20}), Buckets({0: 20}), 1.0) == 1.0


def test_mann_whitney_has_uniform_p_values_where_nothing_differs() -> None:
    generator = np.random.default_rng(5)
    found = []
    for _ in range(400):
        stable, canary = generator.lognormal(-2, 0.5, 200), generator.lognormal(-2, 0.5, 50)
        found.append(mann_whitney(buckets(stable), buckets(canary), 1.0) or 0.0)
    assert abs(float(np.mean(np.array(found) < 0.1)) - 0.1) < 0.05
    assert abs(float(np.mean(found)) - 0.5) < 0.05


def test_ratio_that_is_allowed_is_not_worse() -> None:
    generator = np.random.default_rng(6)
    stable, canary = generator.lognormal(-2, 0.3, 2000), 1.4 * generator.lognormal(-2, 0.3, 2000)
    p = mann_whitney(buckets(stable), buckets(canary), 1.5)
    assert p is not None
    assert p > 0.5
    strict = mann_whitney(buckets(stable), buckets(canary), 1.2)
    assert strict is not None
    assert strict < 1e-6


def test_one_error_of_few_requests_is_noise() -> None:
    arms = BothArms(ArmCounts(requests=1000), ArmCounts(requests=50, errors=1))
    assert reason_to_roll_back(arms, Rules(min_requests=20), 0) is None
    arms.canary.errors = 10
    found = reason_to_roll_back(arms, Rules(min_requests=20), 0)
    assert found is not None
    assert found[0] == "errors"
    assert "20.00% of the canary's answers failed, and 0.00% of the others" in found[1]
    # Whatever is certain: as many more as are allowed are no reason.
    assert reason_to_roll_back(arms, Rules(min_requests=20, max_error_rate=0.2), 0) is None


def test_quantiles_are_within_five_percent() -> None:
    values = np.random.default_rng(7).lognormal(-1, 1, 5000)
    for share in (0.5, 0.99):
        assert buckets(values).quantile(share) == pytest.approx(float(np.quantile(values, share)), rel=0.05)
    assert Buckets().quantile(0.5) is None
    assert buckets([1.0] * 99).quantile(0.99) is None, "of 99 values the largest is no 99th percentile"
    assert buckets([1.0] * 99).quantile(0.5) == pytest.approx(1.0, rel=0.05)


def test_looks_are_due_a_quarter_more_requests_apart() -> None:
    rules = Rules(min_requests=100)
    assert [look_of(n, rules) for n in (99, 100, 124, 125, 157)] == [None, 0, 0, 1, 2]


NUM_LOOKS = 12
SIZES = [math.ceil(100 * LOOK_GROWTH**k) for k in range(NUM_LOOKS)]


def test_canary_that_is_the_same_is_rolled_back_in_fewer_than_one_of_a_hundred_runs() -> None:
    """1,000 canaries that are no worse: 12 looks each, up to 1,165 requests of the canary and as many of the others."""
    strict = Rules(max_error_rate=0.0, max_ttft_ratio=1.0, max_itl_ratio=1.0, max_logprob_drop=0.0)
    rolled_back = sum(rolls_back(seed, strict) is not None for seed in range(1000))
    assert rolled_back / 1000 <= ALPHA


@pytest.mark.parametrize(
    ("word", "fault"),
    [("errors", {"errors": 0.10}), ("ttft", {"slower": 2.0}), ("logprob", {"drop": 0.5})],
)
def test_canary_that_is_worse_is_rolled_back(word: str, fault: dict[str, float]) -> None:
    assert all(rolls_back(seed, Rules(), **fault) == word for seed in range(20))


def rolls_back(seed: int, rules: Rules, errors: float = 0.02, slower: float = 1.0, drop: float = 0.0) -> str | None:
    """Run a canary; return what it is rolled back for."""
    generator = np.random.default_rng(seed)
    arms, before = BothArms(), 0
    for look, size in enumerate(SIZES):
        num, before = size - before, size
        for arm, share, ratio, worse in ((arms.stable, 0.02, 1.0, 0.0), (arms.canary, errors, slower, drop)):
            arm.requests += num
            arm.errors += int(generator.binomial(num, share))
            arm.ttft.merge(buckets(ratio * generator.lognormal(-2, 0.6, num)))
            arm.itl.merge(buckets(generator.lognormal(-4, 0.3, num)))
            arm.perplexity.merge(buckets(np.exp(worse + generator.gamma(4, 0.15, num // 5))))
        found = reason_to_roll_back(arms, rules, look)
        if found is not None:
            return found[0]
    return None


def buckets(values: list[float] | np.ndarray) -> Buckets:
    places, counts = np.unique(np.floor(np.log(values) / math.log(1.05)).astype(int), return_counts=True)
    return Buckets(dict(zip(places.tolist(), counts.tolist(), strict=True)))
