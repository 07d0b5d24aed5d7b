"""Which images a step encodes, and whose embeddings the runner keeps.

The stages of the vision tower are charged to the step's token budget, so a large image passes them, some patches after
the other, over several steps: also where nothing else is computed, because something may come. Embeddings are kept
within a bound, the least recently used go first; only a step that is repeated may exceed it. An image that a running
sequence needs goes only for one that is before it in order, so there is always one that gets on. Interactive sequences
are before the whole batch lane, whose first one keeps the image that it is at all the same: there is room for two of
the largest. Each lane has one image in the tower that has not passed all of it: its vectors take much memory. The next
one waits, unless the sequences that need the first cannot get on before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import EncodeWork, StepPlan
from gpu_worker.core.scheduler_config import MediaConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.stage_speeds import StagePass, StageSpeeds
from shared.errors import BadRequestError
from shared.messages import Lane

MOST_BEGUN = 2
"""Images that have passed a part of the tower at a time, at most: one of each lane."""


@dataclass(slots=True, eq=False)
class _Kept:
    """An image that the runner keeps.

    Attributes:
        num_rows, num_patches: As of `MediaSpan`.
        num_passes: Of its embeddings' patches through stages, when the step that is being planned is done.
        saved: Tokens that batch steps have left unused since the last pass, because they were too few for the next, or
            for the tokens of an image that one step computes.
        holders: Sequences that need it, preempted ones included, each with the end of the image in it.
    """

    num_rows: int
    num_patches: int
    num_passes: int = 0
    saved: float = 0
    holders: list[tuple[Sequence, int]] = field(default_factory=list)


class EncoderSchedule:
    """Plans encoding, step by step: `open`, then `reach` for each share, then `take` for the plan."""

    def __init__(self, config: MediaConfig | None) -> None:
        """Keep nothing yet; without a configuration, no image is taken."""
        self._has_tower = config is not None
        self._config = config or MediaConfig((), 0)
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._num_rows = 0
        self._begun: dict[Lane, bytes] = {}
        self._forgotten: list[bytes] = []
        self.suspected: dict[bytes, int] = {}
        """Images of failed steps, and up to which pass these encoded them."""
        self._works: dict[bytes, EncodeWork] = {}
        self._used: set[bytes] = set()
        self._spent = 0.0
        self._speeds = StageSpeeds(self._config.stages, self._config.max_rows)

    def validate(self, sequence: Sequence) -> None:
        """Refuse images that could never be encoded; any thread may call it.

        Raises:
            BadRequestError: One has more embeddings than are kept, or there is no tower.
        """
        if sequence.media and not self._has_tower:
            raise BadRequestError("This model takes no images.", "messages")
        limit = self._config.max_rows
        for span in sequence.media:
            if span.num_rows > limit:
                problem = f"An image takes {span.num_rows} tokens; at most {limit} are served (low detail takes fewer)."
                raise BadRequestError(problem, "messages")

    def open(self) -> None:
        """Begin a step."""
        self._spent = 0.0
        for kept in self._kept.values():
            if kept.holders:
                kept.holders = [
                    (holder, end)
                    for holder, end in kept.holders
                    if holder.num_computed_tokens < end and holder.status is not SequenceStatus.FINISHED
                ]

    def reach(
        self,
        sequence: Sequence,
        num_tokens: int,
        budget: int,
        *,
        is_alone: bool,
        is_first: bool,
        is_urgent: bool = False,
        spare: float | None = None,
    ) -> tuple[int, int]:
        """Return how many of a sequence's next tokens the step can compute, and what it is charged for its images.

        Args:
            sequence: It has images.
            num_tokens: To compute at most, but for an image that one step computes.
            budget: Tokens that are left of the step's.
            is_alone: Nothing else is computed, so a pass of more embeddings delays no stream.
            is_first: One pass may exceed the budget, or a small one would stop the image for ever.
            is_urgent: More images than fit may be kept for it, and another one that has passed a part of the tower
                begins anew later.
            spare: Tokens beyond the budget. Passes may cost them, too, when steps have saved as many, and those of one
                embedding may cost more than both; None saves none.
        """
        before = self._spent
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        for span in sequence.media:
            if first < span.end and span.start < end:
                room = budget - (self._spent - before)
                kept = self._keep(sequence, span, is_urgent=is_urgent)
                if kept is None or not self._encode(
                    sequence.lane, span, kept, room, is_alone=is_alone, is_first=is_first, spare=spare
                ):
                    end = max(first, span.start)
                    if spare is not None and self._spent == before and span.digest in self._kept:
                        self._kept[span.digest].saved += max(0, budget - (end - first))
                    break
        # Sums of shares of tokens are not exact.
        charged = math.ceil(self._spent - before - 1e-6)
        end = min(end, first + max(0, budget - charged))
        reached = _behind_whole(sequence, first, end)
        if reached == first < end and spare is not None:
            reached = self._saved_whole(sequence, first, budget - charged, spare)
        return reached - first, charged

    def _saved_whole(self, sequence: Sequence, first: int, budget: float, spare: float) -> int:
        """Return the end of an image that one step computes, which begins at `first`, once steps have saved its tokens.

        Until then, return `first`.
        """
        span = next(span for span in sequence.media if span.start == first)
        kept = self._kept[span.digest]
        kept.saved += max(0.0, budget)
        if span.length > min(kept.saved, budget + spare):
            return first
        kept.saved = 0
        return span.end

    @property
    def has_works(self) -> bool:
        """Whether the step that is being planned encodes something."""
        return bool(self._works)

    def take(self) -> tuple[list[bytes], list[EncodeWork]]:
        """Return what the plan says: images to forget, and then those to encode."""
        if not self._forgotten and not self._works:
            self._used.clear()
            return [], []
        taken = self._forgotten, list(self._works.values())
        self._forgotten, self._works = [], {}
        self._used.clear()
        return taken

    def is_suspect(self, sequence: Sequence) -> bool:
        """Return whether a sequence runs of which an image has not passed again what it passed in a failed step."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False
        passed = {span.digest: self._kept.get(span.digest) for span in sequence.media}
        return any((kept.num_passes if kept else 0) < self.suspected.get(digest, 0) for digest, kept in passed.items())

    def observe(
        self, works: Iterable[EncodeWork], encoding_s: float, token_s: float, batch_token_s: float | None = None
    ) -> None:
        """Learn from a step that has landed; see `StageSpeeds.observe`."""
        passes = list[StagePass]()
        for work in works:
            if (kept := self._kept.get(work.digest)) is None:
                return
            done = work.first
            while done < work.end:
                stage, row = divmod(done, kept.num_rows)
                count = min(kept.num_rows - row, work.end - done)
                passes.append(StagePass(stage, kept.num_patches, count))
                done += count
        self._speeds.observe(passes, encoding_s, token_s, batch_token_s)

    def undo(self, plans: Iterable[StepPlan]) -> None:
        """Forget the images that steps encoded, because one has failed; it may not have forgotten what it was to."""
        for plan in plans:
            self._forgotten += plan.forgotten
            for work in plan.encodes:
                if work.digest in self._kept:
                    self._forget(work.digest)

    def _may_begin(self, sequence: Sequence, digest: bytes, *, is_urgent: bool) -> bool:
        """Return whether an image may enter the tower, or has; another one of the lane may be forgotten for it."""
        begun, kept = self._begun.get(sequence.lane), self._kept.get(digest)
        if begun is None or (kept is not None and kept.num_passes):
            return True
        if begun in self._used or not (is_urgent or self._is_behind(begun, sequence)):
            return False
        self._forget(begun)
        return True

    def _is_behind(self, digest: bytes, sequence: Sequence) -> bool:
        """Return whether all sequences that need an image may get on only after `sequence` has.

        Interactive prompts take turns by tenant, so their order says it only of an image that `sequence` needs later.
        """
        holders = [holder for holder, end in self._kept[digest].holders if _is_needed(holder, end)]
        if sequence.lane == "batch" or any(holder is sequence for holder in holders):
            return all(holder.order >= sequence.order for holder in holders)
        return all(holder.order[0] > sequence.order[0] for holder in holders)

    def _pass(self, lane: Lane, digest: bytes, kept: _Kept, count: int) -> None:
        if not kept.num_passes:
            self._begun[lane] = digest
        kept.saved = 0
        kept.num_passes += count
        if kept.num_passes == len(self._config.stages) * kept.num_rows:
            self._leave_tower(digest)

    def _leave_tower(self, digest: bytes) -> None:
        self._begun = {lane: each for lane, each in self._begun.items() if each != digest}

    def _encode(
        self,
        lane: Lane,
        span: MediaSpan,
        kept: _Kept,
        budget: float,
        *,
        is_alone: bool,
        is_first: bool,
        spare: float | None = None,
    ) -> bool:
        """Let an image pass as much of the tower as there is budget for; return True if it has passed all."""
        digest = span.digest
        num_passes = len(self._config.stages) * span.num_rows
        first = self._works[digest].first if digest in self._works else kept.num_passes
        while kept.num_passes < num_passes:
            stage, row = divmod(kept.num_passes, span.num_rows)
            charge = self._speeds.charge(stage, span.num_patches, is_batch=spare is not None)
            if charge.is_first and self._works:
                return False
            left = span.num_rows - row
            least = min(left, charge.least_rows)
            if spare is not None:
                if charge.fixed + charge.row * least > budget + spare:
                    least = 1
                budget += min(kept.saved, max(0.0, charge.fixed + charge.row * least - budget))
            most = min(left, charge.most_rows)
            count = int(min(most, (budget - charge.fixed) / charge.row))
            if count < least and (self._works or not is_first):
                return False
            if count < 1:
                # It exceeds the budget in any case. Few rows take almost as long as one, but delay a stream.
                count = least if is_alone else 1
            self._pass(lane, digest, kept, count)
            self._works[digest] = EncodeWork(digest, first, kept.num_passes)
            self._spent += charge.fixed + count * charge.row
            budget -= charge.fixed + count * charge.row
            if charge.is_first or count == most < left:
                return kept.num_passes == num_passes
        return True

    def _keep(self, sequence: Sequence, span: MediaSpan, *, is_urgent: bool) -> _Kept | None:
        """Return the record of an image that a sequence needs now; None if it has to wait for others."""
        digest = span.digest
        if not self._may_begin(sequence, digest, is_urgent=is_urgent):
            return None
        kept = self._kept.get(digest)
        if kept is None:
            if not self._make_room(sequence, span.num_rows) and not is_urgent:
                return None
            kept = self._kept[digest] = _Kept(span.num_rows, span.num_patches)
            self._num_rows += span.num_rows
        self._kept.move_to_end(digest)
        self._used.add(digest)
        if all(holder is not sequence for holder, _ in kept.holders):
            kept.holders.append((sequence, max(each.end for each in sequence.media if each.digest == digest)))
        return kept

    def _make_room(self, sequence: Sequence, num_rows: int) -> bool:
        """Forget images so that there is room for another; return False, and forget none, where others need theirs."""
        spared, missing, leaving = (
            self._spared(num_rows),
            self._num_rows + num_rows - self._config.max_rows,
            list[bytes](),
        )
        for digest, kept in self._kept.items():
            if missing > 0 and digest != spared and self._may_go(digest, sequence):
                leaving.append(digest)
                missing -= kept.num_rows
        if missing > 0:
            return False
        for digest in leaving:
            self._forget(digest)
        return True

    def _spared(self, num_rows: int) -> bytes | None:
        """Return the image that the first batch sequence is at, unless one of `num_rows` does not fit beside it."""
        needed = [
            (holder.status is not SequenceStatus.RUNNING, holder.order, end, digest)
            for digest, kept in self._kept.items()
            for holder, end in kept.holders
            if holder.lane == "batch" and kept.num_rows + num_rows <= self._config.max_rows
        ]
        return min(needed)[3] if needed else None

    def _forget(self, digest: bytes) -> None:
        self._num_rows -= self._kept.pop(digest).num_rows
        self._leave_tower(digest)
        self._works.pop(digest, None)
        self._forgotten.append(digest)

    def _may_go(self, digest: bytes, sequence: Sequence) -> bool:
        """Return whether an image is not needed, or later than what `sequence` lacks: by it, or by one behind it."""
        if digest in self._used:
            return False
        return all(
            holder.order >= sequence.order or not _is_needed(holder, end) for holder, end in self._kept[digest].holders
        )


def _is_needed(sequence: Sequence, end: int) -> bool:
    return sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens < end


def _behind_whole(sequence: Sequence, first: int, end: int) -> int:
    """Return the last place up to `end`, not before `first`, that is not inside an image that one step computes."""
    for span in sequence.media:
        if span.is_bidirectional and span.start < end < span.end:
            return max(first, span.start)
    return end
