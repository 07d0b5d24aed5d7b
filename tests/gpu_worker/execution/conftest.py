from __future__ import annotations

from tests.gpu_worker.models.conftest import one_thread

__all__ = ["one_thread"]
