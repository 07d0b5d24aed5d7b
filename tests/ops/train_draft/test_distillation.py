import torch
from torch.nn import functional as F

from ops.train_draft.distillation import kl_divergences


def test_divergence_and_gradients_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    # More rows than are computed at once, and numbers that bfloat16 holds exactly.
    student, target = (torch.randn(300, size, generator=generator).bfloat16().float() for size in (24, 40))
    head, target_head = (torch.randn(50, size, generator=generator).bfloat16().float() for size in (24, 40))
    ours, theirs = [(student.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]

    loss = kl_divergences([torch.zeros(300, 40), ours[0]], [target_head, ours[1]], target, target_head)[1]
    (3 * loss).backward()
    wanted = F.softmax(target @ target_head.T, -1)
    expected = F.kl_div(F.log_softmax(theirs[0] @ theirs[1].T, -1), wanted, reduction="batchmean")
    (3 * expected).backward()

    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert (mine.grad - other.grad).norm() < 0.02 * other.grad.norm()


def test_equal_distributions_diverge_by_nothing() -> None:
    hidden, head = torch.randn(5, 8), torch.randn(11, 8)

    assert kl_divergences([hidden, hidden], [head, head], hidden, head).tolist() == [0, 0]
