"""An engine that a bench steps by itself leaves the processor to threads that load KV."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.core.scheduler import RESTORE_POLL_S
from gpu_worker.core.tiers import Wanted
from gpu_worker.execution.tiers.block_load import BlockLoad
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from ops.bench.stepping import SteppedEngine
from tests.gpu_worker.execution.engine_run import make_runner, save_tiny_model
from tests.gpu_worker.execution.tiered_engine import NUM_BLOCKS, OPENED, Served

LOAD_S = 0.2


def test_engine_pauses_while_a_prefix_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path)
    runner = make_runner(tmp_path, num_blocks=NUM_BLOCKS, max_num_seqs=4, max_model_len=80)
    load_from_host: Callable[[BlockTiers, BlockLoad, int, Wanted], bool] = BlockTiers._load_from_host

    def load_slowly(tiers: BlockTiers, load: BlockLoad, number: int, wanted: Wanted) -> bool:
        time.sleep(LOAD_S if number == 0 else 0.0)
        return load_from_host(tiers, load, number, wanted)

    monkeypatch.setattr(BlockTiers, "_load_from_host", load_slowly)
    with OPENED:
        served = Served(runner)
        engine = SteppedEngine(served.engine, runner)
        prompt = engine.random_prompt(60)
        engine.serve_s([prompt], 1)
        for _ in range(4):
            engine.serve_s([engine.random_prompt(60)], 1)
        sequence = engine.add(prompt, 1)
        num_steps = 0
        while engine.engine.has_work():
            engine.step()
            num_steps += 1
    assert sequence.num_restored_blocks > 0
    assert num_steps <= 10 + LOAD_S / RESTORE_POLL_S
