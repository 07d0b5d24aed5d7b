"""What becomes of blocks when a step is undone; the rest is tested with the parts that ask for them."""

from __future__ import annotations

import pytest

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import SequenceStatus
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.sequences import make_sequence


@pytest.mark.parametrize(("num_blocks", "restarts"), [(20, False), (22, False), (23, True)])
def test_sequence_whose_blocks_another_one_keeps_restarts_only_where_there_are_enough_besides(
    num_blocks: int, restarts: bool
) -> None:
    harness = Harness(num_blocks=num_blocks, max_num_batched_tokens=64, headroom_tokens=0, state=StateConfig(32, 1))
    prompt = range(1, 34)
    harness.add(make_sequence(prompt, max_tokens=1))
    harness.run()
    first, second = streams = [make_sequence(prompt, max_tokens=40) for _ in range(2)]
    harness.add(*streams)
    harness.step()
    # The eight blocks that both share may be wrong: who comes next computes its own, and leaves them to be found.
    harness.scheduler._blocks.hide(first)
    harness.add(make_sequence(prompt, max_tokens=1))
    harness.step()
    # This one needs five: of those to be found there are five left, or seven, or all.
    harness.add(newcomer := make_sequence(20, max_tokens=4))
    harness.schedule()
    harness.lose()
    # The first one that restarts begins behind what is found. When it has to give way, the second one finds room.
    assert (first.status is SequenceStatus.RUNNING) is restarts
    assert second.status is SequenceStatus.RUNNING
    harness.run()
    harness.assert_reference(*streams, newcomer)
