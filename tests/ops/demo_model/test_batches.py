"""Batches: shapes, targets and coverage."""

import pytest
import torch

from ops.demo_model.batches import BatchSource, window_length


@pytest.mark.parametrize(
    ("fraction", "length"), [(0.0, 256), (0.49, 256), (0.5, 512), (0.8, 1024), (0.95, 2048), (1.0, 2048)]
)
def test_windows_grow_with_the_training_time(fraction: float, length: int) -> None:
    assert window_length(fraction) == length


def test_targets_are_the_inputs_shifted_by_one() -> None:
    source = BatchSource([[*range(1, 101), 0]], [], tokens_per_batch=40, seed=0)

    inputs, targets = source.next_batch(10)

    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_epoch_covers_nearly_all_tokens_once() -> None:
    source = BatchSource([list(range(1000))], [], tokens_per_batch=100, seed=0)

    tokens = torch.cat([source.next_batch(10)[0].flatten() for _ in range(9)])

    assert len(set(tokens.tolist())) == 900


def test_batches_go_on_past_the_end_of_the_corpus() -> None:
    source = BatchSource([list(range(50))], [[1, 2, 0]] * 3, tokens_per_batch=20, seed=0)

    assert all(source.next_batch(10)[0].shape == (2, 10) for _ in range(20))


def test_same_seed_gives_the_same_batches() -> None:
    first, second = (BatchSource([list(range(500))], [], 40, seed=3) for _ in range(2))

    assert torch.equal(first.next_batch(10)[0], second.next_batch(10)[0])
