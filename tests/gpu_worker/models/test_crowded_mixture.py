"""Mixtures of experts on threads that are far apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores")
def test_thread_that_comes_to_a_layer_when_others_have_left_it_does_nothing_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_worker.models.crowded_mixture", str(tmp_path)]
    # A thread that counts the items of a layer behind waits for ever.
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
