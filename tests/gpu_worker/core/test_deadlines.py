from gpu_worker.core.scheduler import Deadlines
from gpu_worker.core.sequence import SequenceStatus
from tests.gpu_worker.core.sequences import make_sequence


def test_only_unfinished_sequences_past_their_deadline_expire_once() -> None:
    deadlines = Deadlines()
    early, late, done = (make_sequence(2, deadline=deadline) for deadline in (1.0, 3.0, 1.0))
    for sequence in (early, late, done):
        deadlines.watch(sequence, 3)
    done.status = SequenceStatus.FINISHED
    assert deadlines.pop_expired(0.9) == []
    assert deadlines.pop_expired(1.0) == [early]
    assert deadlines.pop_expired(2.0) == []
    assert deadlines.pop_expired(3.5) == [late]


def test_finished_sequences_with_distant_deadlines_are_swept_out() -> None:
    deadlines = Deadlines()
    for _ in range(1000):
        sequence = make_sequence(2, deadline=1e9)
        deadlines.watch(sequence, 1)
        sequence.status = SequenceStatus.FINISHED
    assert len(deadlines._heap) < 100
