import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, Share
from gpu_worker.core.plan import StateWork
from gpu_worker.execution.batch.begun_states import begin_states
from gpu_worker.execution.batch.layout import lay_out
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.state_pool import StatePool
from gpu_worker.layers.layer_state import LayerState
from shared.sampling import Sampling
from tests.gpu_worker.plans import decodes_of


def test_checkpoints_are_copied_when_the_upload_arrives_though_their_slots_are_written_too() -> None:
    part = torch.arange(5.0)[:, None]
    states = StatePool([None, LayerState((part,), None)], 0)
    # Slots 1 and 2 change places.
    sequences = [BatchSequence(slot - 1, str(slot), [7, 8], 2, Sampling(), state_slot=slot) for slot in (1, 2)]
    works = [(place, StateWork(True, source)) for place, source in enumerate((2, 1))]
    plan = decodes_of([Share(sequence, 1, 1, True) for sequence in sequences])
    upload = Upload(torch.device("cpu"))
    layout = lay_out(plan, sequences, np.zeros((2, 1), dtype=np.int32), 4)
    layout = begin_states(states, layout, sequences, works, upload)
    assert layout.states is not None
    assert layout.states.slots.tolist() == [1, 2]
    assert part.view(-1).tolist() == [0, 1, 2, 3, 4]
    upload.send()
    assert part.view(-1).tolist() == [0, 2, 1, 3, 4]
