import numpy as np

from gpu_worker.core.group_tables import StateSlot
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StateWork
from gpu_worker.execution.batch.state_layout import lay_out_states, padded_states, state_copies
from shared.sampling import Sampling


def share(slot: int | None, work: StateWork | None = None) -> ScheduledSequence:
    state = None if slot is None else StateSlot(slot, None, 0)
    return ScheduledSequence(Sequence("a", [1], 1, Sampling(), 1, state_slot=state), 0, 1, True, state=work)


ROWS = np.array([2, 0, 1], dtype=np.int64)


def test_sequences_without_a_slot_have_that_of_their_row() -> None:
    layout = lay_out_states([share(7), share(None), share(5)], ROWS)
    assert layout.slots.tolist() == [7, 0, 5]
    assert ROWS.tolist() == [2, 0, 1], "the rows are somebody else's"
    assert (layout.save_starts, layout.save_tokens, layout.save_slots) == (None, None, None)


def test_saves_of_all_sequences_lie_end_to_end() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    layout = lay_out_states([share(7, first), share(8), share(5, third)], ROWS)
    assert layout.save_starts is not None
    assert layout.save_tokens is not None
    assert layout.save_slots is not None
    assert layout.save_starts.tolist() == [0, 1, 1, 3]
    assert layout.save_tokens.tolist() == [4, 8, 16]
    assert layout.save_slots.tolist() == [9, 3, 6]
    assert layout.save_slots.flags.c_contiguous


def test_padded_states_have_room_for_a_copy_behind_each_token() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    layout = lay_out_states([share(7, first), share(8), share(5, third)], ROWS)
    padded = padded_states(layout, 12, 5, 32)
    arrays = (padded.slots, padded.save_starts, padded.save_tokens, padded.save_slots)
    slots, starts, tokens, targets = (array.tolist() for array in arrays if array is not None)
    assert slots == [7, 8, 5, 12, 12]
    assert starts == [0, 1, 1, 3, 3, 3]
    assert tokens == [4, 8, 16] + [0] * 29
    assert targets == [9, 3, 6] + [12] * 29


def test_padded_states_without_copies_are_of_the_same_sizes() -> None:
    padded = padded_states(lay_out_states([share(7)], ROWS[:1]), 12, 2, 3)
    assert padded.slots.tolist() == [7, 12]
    assert padded.save_starts is not None
    assert padded.save_starts.tolist() == [0, 0, 0]
    assert padded.save_tokens is not None
    assert padded.save_slots is not None
    assert (len(padded.save_tokens), len(padded.save_slots)) == (3, 3)


def test_only_states_that_begin_from_another_slot_are_copied() -> None:
    shares = [
        share(7, StateWork(True, source=3)),
        share(8, StateWork(True)),
        share(5, StateWork(True, source=5)),
        share(4, StateWork(False, saves=((4, 2),))),
        share(1, StateWork(True, source=3)),
    ]
    copies = state_copies(shares)
    assert copies is not None
    assert [array.tolist() for array in copies] == [[3, 3], [7, 1]]
    assert state_copies(shares[1:4]) is None
