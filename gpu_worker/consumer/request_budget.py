"""The budget of KV cache that a request asks for, as this worker can keep to it."""

from __future__ import annotations

from gpu_worker.core.block_budget import BlockBudget, block_budget
from gpu_worker.core.scheduler_config import SchedulerConfig
from shared.errors import BadRequestError
from shared.messages import Request


class RequestBudgets:
    """Reads budgets. Keeps no state."""

    def __init__(self, sizes: SchedulerConfig, problem: str | None) -> None:
        """Read budgets for an engine of these sizes; `problem` is why its model cannot evict, None where it can."""
        self._problem = problem
        self._block_size = sizes.block_size
        self._max_num_blocks = min(sizes.num_blocks, sizes.max_model_len // sizes.block_size)

    def read(self, request: Request) -> BlockBudget | None:
        """Return the blocks that the sequence of a request may hold; None for as many as its tokens need.

        Raises:
            BadRequestError: It cannot have the budget that it asks for.
        """
        if request.kv_budget is None:
            return None
        problem = self._problem
        if request.media:
            problem = "the request shows images"
        if request.pooling is not None:
            problem = "the request generates nothing"
        if problem is not None:
            message = f"kv_budget: no tokens can be evicted here, because {problem}."
            raise BadRequestError(message, "kv_budget", "unsupported_kv_budget")
        return block_budget(request.kv_budget, self._block_size, self._max_num_blocks)
