"""The parts of a scheduler without the scheduler: who waits and runs, and their blocks."""

from __future__ import annotations

from gpu_worker.core.admission import Admission
from gpu_worker.core.landing import set_limits
from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.step import ScheduledSequence, ScheduledStep
from tests.gpu_worker.core.sequences import make_sequence

BLOCK = 4


class Parts:
    """Blocks of four tokens, and the sequences that have or want them."""

    def __init__(self, *, num_blocks: int = 16, max_num_seqs: int = 2, budget: int = 16) -> None:
        self.config = SchedulerConfig(
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1_000,
            headroom_tokens=0,
        )
        self.blocks = SequenceBlocks(self.config)
        self.live = LiveSequences(self.blocks)
        self.admission = Admission(self.config, self.blocks, self.live)
        self.num_steps = self.num_added = 0

    def wait(self, num_tokens: int, **settings: object) -> Sequence:
        """Let a new sequence with such a prompt wait."""
        sequence = make_sequence(num_tokens, **settings)  # type: ignore[arg-type]
        set_limits(sequence, self.config.max_num_tokens)
        self.num_added += 1
        sequence.order = (int(sequence.lane == "batch"), sequence.arrival - sequence.priority * 60.0, self.num_added)
        self.live.add(sequence)
        return sequence

    def run(self, num_tokens: int, **settings: object) -> Sequence:
        """Let a new sequence run, of which all but the last token are computed."""
        sequence = self.wait(num_tokens, **settings)
        self.start(sequence)
        sequence.num_computed_tokens = num_tokens - 1
        self.live.running.reclassify(sequence)
        return sequence

    def start(self, sequence: Sequence, now: float = 0.0) -> None:
        """Start a sequence that waits and is the first of its key."""
        self.admission.start(self.live.waiting[sequence.lane], sequence, now)

    def decode(self, *sequences: Sequence, drafts: int = 0) -> ScheduledStep:
        """Plan a step that decodes these sequences."""
        self.num_steps += 1
        assert self.blocks.try_grow(sequences)
        items = [ScheduledSequence(s, s.num_computed_tokens, 1, True, drafts) for s in sequences]
        plan = ScheduledStep(self.num_steps, items, len(items), num_decodes=len(items))
        for sequence in sequences:
            sequence.num_computed_tokens += 1
            self.live.running.reclassify(sequence)
        self.live.add_step(plan)
        return plan
