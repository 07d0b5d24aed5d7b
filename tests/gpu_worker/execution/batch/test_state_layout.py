from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.plan import StateWork
from gpu_worker.execution.batch.state_layout import lay_out_states, padded_states, state_copies
from shared.sampling import Sampling

Works = list[tuple[int, StateWork]]


def shares(*items: tuple[int | None, StateWork | None]) -> tuple[list[BatchSequence], Works]:
    """Return sequences with these slots, in rows 2, 0, 1, and what becomes of their states."""
    rows = (2, 0, 1, 3, 4)
    sequences = [
        BatchSequence(row, "a", [1], 1, Sampling(), state_slot=slot)
        for row, (slot, _) in zip(rows, items, strict=False)
    ]
    return sequences, [(place, work) for place, (_, work) in enumerate(items) if work is not None]


def test_sequences_without_a_slot_have_that_of_their_row() -> None:
    layout = lay_out_states(*shares((7, None), (None, None), (5, None)))
    assert layout.slots.tolist() == [7, 0, 5]
    assert (layout.save_starts, layout.save_tokens, layout.save_slots) == (None, None, None)


def test_saves_of_all_sequences_lie_end_to_end() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    layout = lay_out_states(*shares((7, first), (8, None), (5, third)))
    assert layout.save_starts is not None
    assert layout.save_tokens is not None
    assert layout.save_slots is not None
    assert layout.save_starts.tolist() == [0, 1, 1, 3]
    assert layout.save_tokens.tolist() == [4, 8, 16]
    assert layout.save_slots.tolist() == [9, 3, 6]
    assert layout.save_slots.flags.c_contiguous


def test_padded_states_have_room_for_a_copy_behind_each_token() -> None:
    first, third = StateWork(False, saves=((4, 9),)), StateWork(True, saves=((8, 3), (16, 6)))
    layout = lay_out_states(*shares((7, first), (8, None), (5, third)))
    padded = padded_states(layout, 12, 5, 32)
    arrays = (padded.slots, padded.save_starts, padded.save_tokens, padded.save_slots)
    slots, starts, tokens, targets = (array.tolist() for array in arrays if array is not None)
    assert slots == [7, 8, 5, 12, 12]
    assert starts == [0, 1, 1, 3, 3, 3]
    assert tokens == [4, 8, 16] + [0] * 29
    assert targets == [9, 3, 6] + [12] * 29


def test_padded_states_without_copies_are_of_the_same_sizes() -> None:
    padded = padded_states(lay_out_states(*shares((7, None))), 12, 2, 3)
    assert padded.slots.tolist() == [7, 12]
    assert padded.save_starts is not None
    assert padded.save_starts.tolist() == [0, 0, 0]
    assert padded.save_tokens is not None
    assert padded.save_slots is not None
    assert (len(padded.save_tokens), len(padded.save_slots)) == (3, 3)


def test_only_states_that_begin_from_another_slot_are_copied() -> None:
    items = [
        (7, StateWork(True, source=3)),
        (8, StateWork(True)),
        (5, StateWork(True, source=5)),
        (4, StateWork(False, saves=((4, 2),))),
        (1, StateWork(True, source=3)),
    ]
    copies = state_copies(*shares(*items))
    assert copies is not None
    assert [array.tolist() for array in copies] == [[3, 3], [7, 1]]
    assert state_copies(*shares(*items[1:4])) is None
