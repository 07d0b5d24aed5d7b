"""Tokens that are drawn and scored where each rank has some logits are those of one process, for few bytes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gpu_worker.layers.ranks import vocabulary as vocabulary_module
from gpu_worker.layers.ranks.vocabulary import vocabulary_of
from gpu_worker.layers.vocabulary import LMHead
from kernels.sampling import INVALID_TOKEN, SamplingParameters, sample_tokens, score_tokens
from tests.gpu_worker.execution.ranks.thread_ranks import ThreadRanks, on_ranks

NUM_ROWS = 24


def parameters(**changes: Any) -> SamplingParameters:
    """Every row asks for something else; `changes` are the same for all."""
    rows = torch.arange(NUM_ROWS)
    values = {
        "inverse_temperature": torch.where(rows % 6 == 0, 0.0, 0.5 + rows / 16).float(),
        "log_min_p": torch.where(rows % 4 == 1, -3.0, -torch.inf),
        "top_k": torch.where(rows % 3 == 1, 1 + 9 * rows, 0).int(),
        "top_p": torch.where(rows % 5 > 1, 0.3 + rows / 40, 1.0).float(),
        "seed": rows * 7919 + 5,
    }
    same = {name: torch.full_like(values[name], value) for name, value in changes.items()}
    return SamplingParameters(**{**values, **same})


def peaked(vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    # Some tokens tie, on either side of where ranks meet.
    logits[:, vocab_size // 2 - 2 : vocab_size // 2 + 3] = logits.amax(1, keepdim=True)
    return logits


def own_part(logits: torch.Tensor, ranks: ThreadRanks) -> torch.Tensor:
    """Return what a head gives a rank: as many columns on each, minus infinity behind the last token."""
    count = -(-logits.shape[1] // ranks.size)
    padded = torch.nn.functional.pad(logits, (0, ranks.size * count - logits.shape[1]), value=-torch.inf)
    return padded[:, ranks.rank * count : (ranks.rank + 1) * count].contiguous()


def test_head_of_one_rank_scores_all_tokens() -> None:
    logits = peaked(17)
    head = LMHead(Mock(to_float32=lambda hidden: logits.clone()), torch.float32, scale=0.5)
    assert torch.equal(head(torch.zeros(NUM_ROWS, 4)), logits / 2)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_head_scores_no_tokens_behind_the_last_one(soft_cap: float | None) -> None:
    """Also where scores are capped: a cap would make minus infinity a score."""
    ranks, product = Mock(size=2, rank=1), Mock(to_float32=lambda hidden: torch.ones(1, 4))
    scores = LMHead(product, torch.float32, 1.0, soft_cap, ranks, vocab_size=7)(torch.zeros(1, 4))
    assert scores.isneginf().tolist() == [[False, False, False, True]]


def drawn(
    logits: torch.Tensor, size: int, given: SamplingParameters, *, is_widened: bool = False
) -> list[torch.Tensor]:
    slots, positions = torch.arange(len(logits)), torch.arange(len(logits)) % 5
    may_truncate = bool((given.top_k > 0).any() or (given.top_p < 1).any() or given.log_min_p.isfinite().any())

    def draw(ranks: ThreadRanks) -> torch.Tensor:
        vocabulary = vocabulary_of(ranks, logits.shape[1])
        own = own_part(logits, ranks)
        own = vocabulary.widened(own) if is_widened else own
        return vocabulary.draw(own, slots, positions, given, may_truncate=may_truncate)

    return [sample_tokens(logits, slots, positions, given), *on_ranks(size, draw)]


@pytest.mark.parametrize(("vocab_size", "size"), [(5, 4), (96, 2), (1001, 3), (5000, 2), (5000, 4)])
@pytest.mark.parametrize("is_widened", [False, True])
def test_ranks_draw_what_one_process_draws(vocab_size: int, size: int, is_widened: bool) -> None:
    for spread in (0.0, 0.1, 3.0):
        one, *others = drawn(peaked(vocab_size, spread), size, parameters(), is_widened=is_widened)
        for tokens in others:
            assert tokens.tolist() == one.tolist()


def test_the_plain_torch_form_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.sampling.dispatch.can_run", lambda _: False)
    one, *others = drawn(peaked(1001), 2, parameters())
    assert all(tokens.tolist() == one.tolist() for tokens in others)


def test_rows_that_are_no_distribution_draw_nothing() -> None:
    logits = peaked(96)
    logits[1, 90] = torch.nan
    logits[2, 3] = torch.inf
    logits[6, 50] = torch.nan
    logits[7] = -torch.inf
    one, *others = drawn(logits, 2, parameters())
    assert one[[1, 2, 6, 7]].tolist() == [INVALID_TOKEN] * 4
    assert all(tokens.tolist() == one.tolist() for tokens in others)


@pytest.mark.parametrize(("vocab_size", "size", "num_top"), [(5, 4, 5), (96, 2, 0), (1001, 3, 20), (40, 2, 30)])
def test_ranks_score_as_one_process(vocab_size: int, size: int, num_top: int) -> None:
    logits = peaked(vocab_size)
    token_ids = (torch.arange(NUM_ROWS) * 31) % vocab_size
    expected = score_tokens(logits, token_ids, num_top)
    found = on_ranks(
        size, lambda ranks: vocabulary_of(ranks, vocab_size).score(own_part(logits, ranks), token_ids, num_top)
    )
    for scores in found:
        torch.testing.assert_close(scores.chosen, expected.chosen, atol=1e-5, rtol=0)
        assert scores.top_ids.tolist() == expected.top_ids.tolist()
        torch.testing.assert_close(scores.top_values, expected.top_values, atol=1e-5, rtol=0)


class CountingRanks(ThreadRanks):
    """Counts the bytes that a rank hands to the others."""

    num_bytes = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_bytes += x.nbytes
        return super().gather(x)


def bytes_of_a_row(vocab_size: int, given: SamplingParameters) -> float:
    logits, slots = peaked(vocab_size), torch.arange(NUM_ROWS)

    def sample(ranks: ThreadRanks) -> int:
        counting = CountingRanks(ranks.rank, ranks.size, ranks._meeting, has_whole_experts=False)
        vocabulary, own = vocabulary_of(counting, vocab_size), own_part(logits, ranks)
        tokens = vocabulary.draw(own, slots, slots, given, may_truncate=bool((given.top_p < 1).any()))
        vocabulary.score(own, tokens, 5)
        return counting.num_bytes

    first, second = on_ranks(2, sample)
    assert first == second
    return first / NUM_ROWS


def test_bytes_of_a_sampled_row_do_not_depend_on_the_vocabulary() -> None:
    plain = {"log_min_p": -torch.inf, "top_k": 0, "top_p": 1.0}
    ways = ({"inverse_temperature": 0.0, **plain}, {"inverse_temperature": 1.0, **plain}, {"top_k": 40, "top_p": 0.9})
    for way in ways:
        small, large = (bytes_of_a_row(vocab_size, parameters(**way)) for vocab_size in (2_000, 50_000))
        assert small == large < 200 + (4 * vocabulary_module._MAX_LISTED if way["top_p"] < 1 else 0)


@pytest.mark.parametrize("vocab_size", [101, 700])
def test_marked_rows_draw_the_same_on_any_number_of_ranks(vocab_size: int) -> None:
    logits, given = peaked(vocab_size), parameters()
    marks = torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    marks[::4] = 0
    slots = positions = torch.arange(NUM_ROWS)
    expected = sample_tokens(logits, slots, positions, given, marks=marks)

    def draw(ranks: ThreadRanks) -> torch.Tensor:
        vocabulary = vocabulary_of(ranks, vocab_size)
        return vocabulary.draw(own_part(logits, ranks), slots, positions, given, may_truncate=True, marks=marks)

    for drawn_by_rank in on_ranks(3, draw):
        assert torch.equal(drawn_by_rank, expected)
    assert not torch.equal(expected, sample_tokens(logits, slots, positions, given))


@pytest.mark.parametrize(("size", "num_stages", "is_shared"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_numbers_of_the_first_rank_reach_ranks_and_stages(size: int, num_stages: int, is_shared: bool) -> None:
    ranks = Mock(size=size, num_stages=num_stages, rank=0, stage=num_stages - 1)
    numbers = torch.ones(3)
    shared = vocabulary_of(ranks, 16).share(numbers)
    assert (shared is ranks.share.return_value, shared is numbers) == (is_shared, not is_shared)


@pytest.mark.parametrize(("rank", "num_told"), [(0, 1), (1, 0)])
def test_first_rank_of_the_first_stage_tells_its_numbers_to_the_last(rank: int, num_told: int) -> None:
    ranks = Mock(size=2, num_stages=3, rank=rank, stage=0)
    numbers = torch.ones(3)
    assert vocabulary_of(ranks, 16).share(numbers) is numbers
    assert (ranks.tell_last.call_count, ranks.share.call_count) == (num_told, 0)
