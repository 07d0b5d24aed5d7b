"""The detector: exact p-values, uniform over texts that no key has marked, and which tokens count."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels.sampling import token_uniforms
from ops.bench.watermark import auc, edited
from ops.watermark import detect, log_gamma_tail, scored_places, scores
from shared.watermark import derived_key, mark_of


@pytest.mark.parametrize("count", [1, 3, 50, 196, 2000])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.1, 1.4])
def test_tail_is_the_incomplete_gamma_function(count: int, factor: float) -> None:
    score = count * factor
    given = torch.tensor([count, score], dtype=torch.float64)
    expected = float(torch.special.gammaincc(given[0], given[1]))
    assert math.exp(log_gamma_tail(count, score)) == pytest.approx(expected, rel=1e-8, abs=1e-300)


def test_tail_of_certain_texts_has_a_logarithm_still() -> None:
    assert log_gamma_tail(0, 0.0) == 0.0
    assert -2000 < log_gamma_tail(200, 2500.0) < -1500


def test_p_values_of_unmarked_texts_are_uniform() -> None:
    """Texts with few words repeat contexts; these count once."""
    source = random.Random(1)
    texts = [([source.randrange(4) for _ in range(80)], source.randbytes(32)) for _ in range(1500)]
    counts, sums = scores(texts)
    assert len(set(counts.tolist())) > 5
    p_values = sorted(math.exp(log_gamma_tail(int(n), float(s))) for n, s in zip(counts, sums, strict=True))
    # Kolmogorov and Smirnov's distance of p = 0.0005.
    distance = max(abs(value - (place + 0.5) / len(p_values)) for place, value in enumerate(p_values))
    assert distance < 2.02 / math.sqrt(len(p_values))


def test_each_context_counts_once() -> None:
    assert scored_places([1, 2, 3]) == scored_places([1, 2, 3, 4]) == []
    assert scored_places([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 7]) == [4, 5, 6, 7, 8, 10]
    assert detect([1] * 100, bytes(32)).num_scored == 1
    assert detect([1, 2], bytes(32)).p_value == 1.0


def test_score_is_the_sum_over_the_tokens_of_their_luck() -> None:
    key, text = bytes(range(32)), [3, 1, 4, 1, 5, 9]
    marks = torch.tensor([mark_of(key, [3, 1, 4, 1]), mark_of(key, [1, 4, 1, 5])])
    uniforms = token_uniforms(marks, torch.tensor([5, 9])).tolist()
    assert detect(text, key).score == pytest.approx(-sum(math.log(1 - u) for u in uniforms))


def test_key_of_a_model_tells_neither_the_secret_nor_that_of_another_model() -> None:
    secret = "ab" * 32
    keys = {derived_key(secret, name) for name in ("a", "b", "a/b")} | {derived_key("ac" * 32, "a")}
    assert len(keys) == 4
    assert secret not in keys


def test_area_under_the_curve_and_edits() -> None:
    assert auc([-9.0, -8.0], [-1.0, 0.0]) == 1.0
    assert auc([-1.0], [-2.0, -0.5]) == 0.5
    changed = edited(list(range(1000, 1100)), 0.2, 50, random.Random(0))
    assert sum(token < 50 for token in changed) == 20
