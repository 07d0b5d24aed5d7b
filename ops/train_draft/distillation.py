"""The loss that all drafts learn by: how far the student's next-token distributions are from the target's.

All distributions are computed from hidden vectors, a few rows at a time, and the gradients along with them: the logits
of a whole batch would not fit into the processor's cache, nor need they ever exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ROWS = 256


def kl_divergences(
    students: Sequence[Tensor], student_heads: Sequence[Tensor], target: Tensor, target_head: Tensor
) -> Tensor:
    """Return the mean KL divergence of each student's distributions from the target's, in nats.

    Gradients go to the students' hidden vectors and, where they are trained, to their heads. Products are computed in
    bfloat16, all else in float32.

    Shapes:
        students: `[num_rows, student_size]` each
        student_heads: `[vocab_size, student_size]` each
        target: `[num_rows, hidden_size]`
        target_head: `[vocab_size, hidden_size]`
        result: `[len(students)]`
    """
    losses: Tensor = _Divergences.apply(len(students), target, target_head, *students, *student_heads)  # type: ignore[no-untyped-call]
    return losses


class _Divergences(torch.autograd.Function):
    """Computes the gradients forwards, since a backward pass would have to compute the logits again."""

    @staticmethod
    def forward(ctx: Any, count: int, target: Tensor, target_head: Tensor, *given: Tensor) -> Tensor:
        students, heads = ([tensor.bfloat16() for tensor in part] for part in (given[:count], given[count:]))
        target, target_head = target.bfloat16(), target_head.bfloat16()
        trains_head = ctx.needs_input_grad[3 + count :]
        grads = [torch.empty_like(student, dtype=torch.float32) for student in students]
        head_grads = [
            torch.zeros_like(head, dtype=torch.float32) if is_trained else None
            for head, is_trained in zip(heads, trains_head, strict=True)
        ]
        sums = torch.zeros(count)
        for start in range(0, len(target), _ROWS):
            rows = slice(start, start + _ROWS)
            wanted = torch.log_softmax((target[rows] @ target_head.T).float(), -1)
            shares = wanted.exp()
            for index, (student, head) in enumerate(zip(students, heads, strict=True)):
                ours = torch.log_softmax((student[rows] @ head.T).float(), -1)
                sums[index] += torch.dot(shares.flatten(), (wanted - ours).flatten())
                grad = ours.exp_().sub_(shares).bfloat16()
                grads[index][rows] = grad @ head
                kept = head_grads[index]
                if kept is not None:
                    kept += grad.T @ student[rows]
        ctx.save_for_backward(*grads, *head_grads)
        ctx.num_rows = len(target)
        return sums / len(target)

    @staticmethod
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor | None, ...]:
        count = len(scales)
        scaled = (scales / ctx.num_rows).repeat(2)
        grads = [None if grad is None else grad * scaled[index] for index, grad in enumerate(ctx.saved_tensors)]
        assert len(grads) == 2 * count
        return (None, None, None, *grads)
