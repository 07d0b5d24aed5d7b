import numpy as np
import torch

from gpu_worker.core.group_tables import StateSlot
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StateWork
from gpu_worker.execution.batch.begun_states import begin_states
from gpu_worker.execution.batch.layout import lay_out
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.state_pool import StatePool
from gpu_worker.layers.layer_state import LayerState
from shared.sampling import Sampling


def test_checkpoints_are_copied_when_the_upload_arrives_though_their_slots_are_written_too() -> None:
    part = torch.arange(5.0)[:, None]
    states = StatePool([None, LayerState((part,), None)], 0)
    # Slots 1 and 2 change places.
    scheduled = []
    for slot, source in ((1, 2), (2, 1)):
        sequence = Sequence(str(slot), [7, 8], 2, Sampling(), 1, state_slot=StateSlot(slot, source, 0))
        scheduled.append(ScheduledSequence(sequence, 1, 1, True, state=StateWork(True, source)))
    rows, tables = np.array([0, 1], dtype=np.int64), np.zeros((2, 1), dtype=np.int32)
    upload = Upload(torch.device("cpu"))
    layout = begin_states(states, lay_out(scheduled, rows, tables, 4), scheduled, upload)
    assert layout.states is not None
    assert layout.states.slots.tolist() == [1, 2]
    assert part.view(-1).tolist() == [0, 1, 2, 3, 4]
    upload.send()
    assert part.view(-1).tolist() == [0, 2, 1, 3, 4]
