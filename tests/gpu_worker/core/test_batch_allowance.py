from __future__ import annotations

from gpu_worker.core.batch_allowance import MIN_CHUNK_TOKENS, BatchAllowance
from gpu_worker.core.step_time import StepTimeModel


def test_chunk_shrinks_to_what_is_left_but_not_below_what_is_worth_a_step(gpu: StepTimeModel) -> None:
    def allowance(seconds: float, *, is_first_free: bool = False) -> BatchAllowance:
        return BatchAllowance(seconds, gpu, is_first_free=is_first_free)

    enough = gpu.batch_sequence_s + 100 * gpu.token_s
    assert allowance(enough).take_chunk(1000) in (100, 101)
    assert allowance(enough).take_chunk(50) == 50
    assert allowance(gpu.batch_sequence_s + 3 * gpu.token_s).take_chunk(1000) == 0
    assert allowance(gpu.batch_sequence_s + 3 * gpu.token_s).take_chunk(4) in (0, 4)
    assert allowance(0.0, is_first_free=True).take_chunk(1000) == MIN_CHUNK_TOKENS
    assert allowance(-1.0, is_first_free=True).take_chunk(5) == 5


def test_one_sequence_at_most_is_free(cpu: StepTimeModel) -> None:
    allowance = BatchAllowance(-1.0, cpu, is_first_free=True)
    assert allowance.has_room
    assert not allowance.is_spent
    assert allowance.take_decodes(8) == 1
    assert not allowance.has_room
    assert allowance.is_spent
    assert (allowance.take_decodes(7), allowance.take_chunk(20)) == (0, 0)


def test_whole_prompt_is_taken_if_all_of_it_fits_or_as_the_first_that_is_free(gpu: StepTimeModel) -> None:
    enough = gpu.batch_sequence_s + 100 * gpu.token_s
    assert BatchAllowance(enough, gpu).take_whole(100)
    assert not BatchAllowance(enough, gpu).take_whole(103)
    allowance = BatchAllowance(0.0, gpu, is_first_free=True)
    assert allowance.take_whole(1000)
    assert not allowance.take_whole(1)


def test_beside_people_a_chunk_may_be_a_single_token(cpu: StepTimeModel) -> None:
    def allowance() -> BatchAllowance:
        return BatchAllowance(cpu.batch_sequence_s + 2.5 * cpu.token_s, cpu, is_throttled=True)

    assert allowance().has_room
    assert allowance().take_chunk(1000) == 3
    assert BatchAllowance(0.9 * cpu.batch_sequence_s, cpu, is_throttled=True).take_chunk(1000) == 0
    # Between two visits a step is worth its fixed part.
    assert BatchAllowance(-1.0, cpu, is_first_free=True, is_throttled=True).take_chunk(1000) == MIN_CHUNK_TOKENS
