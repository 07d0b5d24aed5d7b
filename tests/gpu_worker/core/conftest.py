"""Models of step times as a CPU and a GPU teach them."""

from __future__ import annotations

import pytest

from gpu_worker.core.step_time import StepTimeModel
from tests.gpu_worker.core.learned_times import model_of


@pytest.fixture(scope="session")
def cpu() -> StepTimeModel:
    """Return what small models cost on a CPU: sequences are dear."""
    return model_of(0.75e-3, 0.18e-3, 0.06e-3)


@pytest.fixture(scope="session")
def gpu() -> StepTimeModel:
    """Return what a step costs on a GPU: sequences are nearly free."""
    return model_of(6e-3, 0.03e-3, 0.03e-3)
