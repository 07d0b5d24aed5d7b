"""Lines that cannot be published now wait by their reason."""

from __future__ import annotations

from gateway.batches.input_lines import InputLine
from gateway.batches.set_aside import SetAside


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def place(number: int) -> InputLine:
    return InputLine(number, 0, 9, b"data")


def test_one_line_of_each_reason_is_tried_each_second_and_the_others_follow_once_it_is_published() -> None:
    clock = Clock()
    aside = SetAside(clock)
    assert not aside
    for number in range(1, 51):
        aside.wait(place(number), 0, "model a")
    aside.wait(place(51), 2, "model b")
    clock.now += 0.9
    assert aside.take_due() == []
    clock.now += 0.2
    assert aside.take_due() == [(InputLine(1, 0, 9, b""), 0), (InputLine(51, 0, 9, b""), 2)]
    # `a` is still away, and its line waits behind the others.
    aside.wait(place(1), 0, "model a")
    assert aside.take_due() == []
    clock.now += 1.0
    assert [each.number for each, _ in aside.take_due()] == [2]
    assert [each.number for each, _ in aside.take_due()] == list(range(3, 35))
    assert [each.number for each, _ in aside.take_due()] == [*range(35, 51), 1]
    assert not aside
    assert aside.take_due() == []


def test_line_whose_jobs_are_renamed_is_due_at_once_and_many_reasons_take_turns() -> None:
    clock = Clock()
    aside = SetAside(clock)
    for number in range(1, 41):
        aside.wait(place(number), 0, f"model {number}")
    aside.repeat(place(41), 1)
    assert aside.take_due() == [(InputLine(41, 0, 9, b""), 1)]
    clock.now += 1.0
    tried = [each.number for each, _ in aside.take_due()]
    assert tried == list(range(1, 33))
    for number in tried:
        aside.wait(place(number), 0, f"model {number}")
    clock.now += 1.0
    assert [each.number for each, _ in aside.take_due()][:8] == list(range(33, 41))
    assert len(aside.take_all()) == len(tried) - 24
    assert not aside
