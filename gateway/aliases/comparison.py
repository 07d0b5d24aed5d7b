"""Compares the two arms of a canary, and says when it is worse by more than chance.

Each arm's counts are sums, so those of several gateways add up. Three rules keep noise from rolling a canary back:

- *Tests.* Failed answers are compared by Fisher's exact test, which holds for small counts too. Times, and
  perplexities (`exp` of the negative mean log probability), are compared by the Mann-Whitney test on buckets: do the
  canary's values, divided by the allowed ratio, tend to be larger than the other arm's? Buckets grow by a constant
  factor, so a division is a shift by whole buckets, rounded in the canary's favour. All tests are one-sided.
- *Looks.* To test again with every request would find a difference sooner or later. The arms are compared only as the
  canary's requests reach `min_requests`, and each time there are a quarter more. Look `k`, from 0, may err with
  probability `6 alpha / (pi (k + 1))**2`, divided among the four tests; the sum over all looks is `ALPHA`.
- *Size.* A difference that is certain, and smaller than what the rules allow, does not count.

The tests take requests for independent of each other. Only the middle of the times is tested, not their tails.

Sources: R. A. Fisher, *Statistical Methods for Research Workers*, 1934, section 21.02; H. B. Mann and D. R. Whitney,
*On a test of whether one of two random variables is stochastically larger than the other*, 1947, with the variance for
ties of E. L. Lehmann, *Nonparametrics*, 1975, section 1.4; for the looks, the union bound (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct, field

from gateway.aliases.table import Rules

ALPHA = 0.01
"""Probability, at most, that one process ever rolls a canary back that is no worse."""
LOOK_GROWTH = 1.25
NUM_TESTS = 4
# Values of either arm from which the normal approximation holds.
MIN_VALUES = 20

_LOG_GROWTH = math.log(1.05)
# From 1e-7 to 1e7.
_MOST_BUCKETS = 330

Count = Annotated[int, Meta(ge=0, le=10**9)]
Place = Annotated[int, Meta(ge=-_MOST_BUCKETS, le=_MOST_BUCKETS)]


class Buckets(Struct):
    """Counts of positive values by size; a bucket's values are within 5 % of each other."""

    counts: dict[Place, Count] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Count a value."""
        place = math.floor(math.log(value) / _LOG_GROWTH) if value > 0 else -_MOST_BUCKETS
        place = min(_MOST_BUCKETS, max(-_MOST_BUCKETS, place))
        self.counts[place] = self.counts.get(place, 0) + 1

    def merge(self, other: Buckets) -> None:
        """Add another's counts."""
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """Return the value below which this share lies, within 5 %; None of values too few to tell it."""
        if self.total * min(share, 1 - share) < 1:
            return None
        missing = share * self.total
        for place in sorted(self.counts):
            missing -= self.counts[place]
            if missing <= 0:
                return math.exp((place + 0.5) * _LOG_GROWTH)
        return None


class ArmCounts(Struct):
    """What one arm's requests came to; times are seconds. `logprob` adds up the means of `num_logprobs` answers."""

    requests: Count = 0
    errors: Count = 0
    ttft: Buckets = field(default_factory=Buckets)
    itl: Buckets = field(default_factory=Buckets)
    perplexity: Buckets = field(default_factory=Buckets)
    logprob: Annotated[float, Meta(ge=-1e15, le=1e15)] = 0.0
    num_logprobs: Count = 0

    def __post_init__(self) -> None:
        """Refuse counts from another process that cannot be."""
        if self.errors > self.requests:
            raise ValueError("more answers failed than were asked for")

    def merge(self, other: ArmCounts) -> None:
        """Add another's counts."""
        for name in ("requests", "errors", "logprob", "num_logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ttft", "itl", "perplexity"):
            getattr(self, name).merge(getattr(other, name))


class BothArms(Struct):
    """The counts of both arms."""

    stable: ArmCounts = field(default_factory=ArmCounts)
    canary: ArmCounts = field(default_factory=ArmCounts)

    def merge(self, other: BothArms) -> None:
        """Add another's counts."""
        self.stable.merge(other.stable)
        self.canary.merge(other.canary)


def look_of(num_requests: int, rules: Rules) -> int | None:
    """Return which comparison is due at this number of canary requests; None before the first."""
    if num_requests < rules.min_requests:
        return None
    return math.floor(math.log(num_requests / rules.min_requests) / math.log(LOOK_GROWTH) + 1e-9)


def verdict_so_far(arms: BothArms, rules: Rules) -> str:
    """Say how far the comparison of a canary that runs has come."""
    if (missing := rules.min_requests - arms.canary.requests) > 0:
        return f"judged after {missing} more requests"
    if arms.stable.requests < MIN_VALUES:
        return f"cannot be judged: the other model has had {arms.stable.requests} requests, {MIN_VALUES} are needed"
    if min(arms.canary.perplexity.total, arms.stable.perplexity.total) < MIN_VALUES:
        return "not worse so far; of too few answers are log probabilities known"
    return "not worse so far"


def reason_to_roll_back(arms: BothArms, rules: Rules, look: int) -> tuple[str, str] | None:
    """Return how the canary is significantly worse, as a word and a sentence; None if it is not."""
    level = ALPHA * 6 / (math.pi * (look + 1)) ** 2 / NUM_TESTS
    return next(_differences(arms, rules, level), None)


def _differences(arms: BothArms, rules: Rules, level: float) -> Iterator[tuple[str, str]]:
    stable, canary = arms.stable, arms.canary
    before, after = stable.errors / max(1, stable.requests), canary.errors / max(1, canary.requests)
    if after - before > rules.max_error_rate:
        chance = fisher(stable.errors, stable.requests, canary.errors, canary.requests)
        if chance < level:
            told = f"{after:.2%} of the canary's answers failed, and {before:.2%} of the others"
            yield "errors", f"{told} (allowed: {rules.max_error_rate:.2%} more; Fisher's p = {chance:.1e})"
    drop = math.exp(rules.max_logprob_drop)
    for name, words, ratio, pair in (
        ("ttft", "time to first token", rules.max_ttft_ratio, (stable.ttft, canary.ttft)),
        ("itl", "time between tokens", rules.max_itl_ratio, (stable.itl, canary.itl)),
        ("logprob", "perplexity of its own answers", drop, (stable.perplexity, canary.perplexity)),
    ):
        p = mann_whitney(*pair, ratio)
        if p is not None and p < level:
            scale, unit = (1.0, "") if name == "logprob" else (1e3, " ms")
            others, own = (f"{scale * (each.quantile(0.5) or 0.0):.3g}{unit}" for each in pair)
            told = f"the canary's {words} is {own} in the median, and the other arm's {others}"
            yield name, f"{told} (allowed: {ratio:.2f} times as much; Mann-Whitney p = {p:.1e})"


def fisher(errors: int, num: int, other_errors: int, other_num: int) -> float:
    """Return the probability that chance gives the second group so large a part of all errors (Fisher, one-sided)."""
    total, all_errors = num + other_num, errors + other_errors
    whole = _log_choose(total, all_errors)
    mode = (all_errors + 1) * (other_num + 1) // (total + 2)
    chance = 0.0
    for k in range(max(other_errors, all_errors - num), min(all_errors, other_num) + 1):
        term = math.exp(_log_choose(other_num, k) + _log_choose(num, all_errors - k) - whole)
        chance += term
        # Behind the mode they only shrink.
        if k > mode and term < 1e-12 * chance:
            break
    return min(1.0, chance)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def mann_whitney(stable: Buckets, canary: Buckets, ratio: float) -> float | None:
    """Return how likely chance alone makes `canary / ratio` so large; None with too few values (one-sided)."""
    num, num_canary = stable.total, canary.total
    if min(num, num_canary) < MIN_VALUES:
        return None
    shift = math.ceil(math.log(ratio) / _LOG_GROWTH - 1e-9)
    shifted = {place - shift: count for place, count in canary.counts.items()}
    below, u, ties = 0, 0.0, 0.0
    for place in sorted(stable.counts.keys() | shifted.keys()):
        same, own = stable.counts.get(place, 0), shifted.get(place, 0)
        u += own * (below + same / 2)
        below += same
        ties += float(same + own) ** 3 - (same + own)
    total = num + num_canary
    variance = num * num_canary / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    z = (u - num * num_canary / 2 - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2)) / 2
