from __future__ import annotations

from tests.gpu_worker.consumer.conftest import gateway, make_worker, model, worker

__all__ = ["gateway", "make_worker", "model", "worker"]
