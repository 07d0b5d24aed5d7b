from __future__ import annotations

import math

import torch

from gpu_worker.execution.sampling.token_choice import Truncation, choose, choose_truncated

WEIGHTS = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
SCALED = WEIGHTS.log()


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def keep_all() -> Truncation:
    return Truncation(torch.tensor([[-math.inf]]), torch.tensor([[0]]), torch.tensor([[0.999999]]))


def test_draw_inverts_the_cumulative_distribution_in_order_of_ids() -> None:
    for uniform, token_id in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (0.9999, 4)):
        assert choose(SCALED, number(uniform), None).tolist() == [token_id]
        assert choose_truncated(SCALED, number(uniform), keep_all()).tolist() == [token_id]


def test_largest_number_below_one_draws_a_possible_token() -> None:
    largest = number(1 - 2**-53)
    assert choose(SCALED, largest, None).tolist() == [4]
    assert choose_truncated(SCALED, largest, keep_all()).tolist() == [4]


def test_rows_that_need_more_candidates_keep_their_places() -> None:
    flat, peaked = torch.zeros(2000), torch.full((2000,), -50.0)
    peaked[7] = 0.0
    scaled = torch.stack((flat, peaked, flat, peaked))
    truncation = Truncation(
        torch.full((4, 1), -math.inf), torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), 0.99)
    )
    uniform = torch.tensor([0.5, 0.5, 0.0, 0.9], dtype=torch.float64)
    first, second, third, fourth = choose_truncated(scaled, uniform, truncation).tolist()
    assert 900 < first < 1100
    assert third < 30
    assert second == fourth == 7


def test_tokens_that_tie_at_the_boundary_of_top_p_stand_together() -> None:
    # Half the mass is reached within the four tokens of weight 0.15; whichever come first, none may be left out.
    scaled = torch.tensor([[0.4, 0.15, 0.15, 0.15, 0.15]]).log()
    truncation = Truncation(torch.tensor([[-math.inf]]), torch.tensor([[0]]), torch.tensor([[0.5]]))
    drawn = {choose_truncated(scaled, number(step / 50), truncation).item() for step in range(50)}
    assert drawn == {0, 1, 2, 3, 4}
