import numpy as np
import torch
from msgspec import structs

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.layout import lay_out
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.state_layout import lay_out_states
from gpu_worker.execution.batch.step_context import step_context
from gpu_worker.execution.batch.step_tensors import StagedStep
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.kv_cache import allocate_groups
from gpu_worker.execution.memory.state_pool import allocate_states
from gpu_worker.layers.cache_layout import CacheLayout, KeepsState, KeepsTokens, StatePart
from kernels.layer_cache import CacheShape
from shared.sampling import Sampling
from tests.gpu_worker.plans import plan_of

CPU = torch.device("cpu")
SHAPE = CacheShape(1, 8, 8)
BLOCK = 4
LAYOUT = CacheLayout(
    (KeepsTokens(SHAPE, None), KeepsTokens(SHAPE, 5), KeepsState((StatePart((2,), torch.float32),)), None)
)


def test_layers_find_their_groups_tables_and_states() -> None:
    cache = allocate_groups(LAYOUT, [10, 6], BLOCK, torch.float32, CPU)
    states = allocate_states(LAYOUT, 3, 0, CPU)
    rows = BatchRows(3, 4, CPU, num_windows=1)
    sequence = Sequence("a", list(range(6)), 6, Sampling(), 1, block_table=[9, 4])
    sequence.window_tables = (WindowTable([3, 5], 0, 2, 0),)
    sequences, plan, upload = BatchSequences(), plan_of([ScheduledSequence(sequence, 5, 1, True)]), Upload(CPU)
    sequences.apply(plan)
    rows.follow(plan, upload)
    windows = [tables.host for tables in rows.windows]
    layout = lay_out(plan, sequences.of(plan.rows), rows.tables, BLOCK, None, windows)
    staged = StagedStep(structs.replace(layout, states=lay_out_states(sequences.of(plan.rows), plan.states)), upload)
    upload.send()
    context = step_context(staged.tensors, rows, cache, states, max_context_len=6)
    # Token 5 is the second of the second block, in each group's own blocks.
    assert context.slot_mapping.tolist() == [4 * BLOCK + 1]
    assert context.block_tables[0].tolist() == [9, 4, 0, 0]
    (window,) = context.windows
    assert window.slot_mapping.tolist() == [5 * BLOCK + 1]
    assert window.block_tables[0].tolist() == [3, 5, 0, 0]
    assert context.group_of_layer == (0, 1, None, None)
    assert [state is None for state in context.states] == [True, True, False, True]
    assert context.state_rows is not None
    assert context.state_rows.slots.tolist() == plan.rows
    assert context.context_lens.tolist() == [6]
    assert np.array_equal(context.query_starts.numpy(), [0, 1])
    assert step_context(staged.tensors, rows, cache, None, 6).states == ()
