from tests.gpu_worker.models.conftest import one_thread, pair_of

__all__ = ["one_thread", "pair_of"]
