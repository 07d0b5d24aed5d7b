"""Encodes the images that plans name, keeps their embeddings, and says which of them a step's tokens are.

Owns the vision tower's results, by digest. The scheduler decides which images are kept, and for how long: plans name
the images to encode and to forget. Where several processes compute a step, one encodes, and shares the embeddings of
its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from itertools import pairwise

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.media import MediaSpan, SharedImages
from gpu_worker.core.plan import EncodeWork, StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.batch.placed_tokens import axis_positions
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import Int64s
from gpu_worker.layers.media_inputs import BidirectionalSpan, MediaInputs
from gpu_worker.models.vision.tower import EncodedImage, Encoding, VisionTower
from gpu_worker.models.vision.vision_config import VisionConfig
from shared.errors import HeadraceError


class MissingImageError(HeadraceError):
    """The pixels of an image that a plan names are not there."""

    def __init__(self) -> None:
        super().__init__("the pixels of an image are not there any more")


class EncodedStep:
    """The pending step of a plan that encodes images and schedules nothing."""

    def __init__(self, step: int, device: torch.device) -> None:
        self._step = step
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def result(self) -> StepResult:
        """Wait for the device; return an answer for no sequence."""
        if self._done is not None:
            self._done.synchronize()
        return StepResult(self._step, [])


class ImageEncoder:
    """Not thread safe: the runner's thread calls it.

    Attributes:
        has_axes: Positions have several axes.
    """

    def __init__(
        self,
        vision: VisionConfig,
        tower: VisionTower | None,
        images: SharedImages,
        like: torch.Tensor,
        share: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> None:
        """Encode with a tower, or let `share` overwrite rows by another process's; `like` is an embedding."""
        self._tower = tower
        self._images = images
        self._image_token = vision.form.token
        self._num_outputs = 1 + len(vision.deep)
        self._like = like
        self._share = share
        axes = vision.rotary_axes
        self._rotary_axes = torch.tensor(axes, dtype=torch.int64, device=like.device) if axes else None
        self.has_axes = bool(axes)
        self._begun: dict[bytes, Encoding] = {}
        self._encoded: dict[bytes, EncodedImage] = {}

    def clear(self) -> None:
        """Forget all images."""
        self._begun.clear()
        self._encoded.clear()

    def encode(self, plan: StepPlan) -> None:
        """Forget and encode what a plan says; `MissingImageError` if pixels are not there."""
        if self._tower is None:
            return
        for digest in plan.forgotten:
            self._begun.pop(digest, None)
            self._encoded.pop(digest, None)
        for work in plan.encodes:
            self._advance(self._tower, work)

    def _advance(self, tower: VisionTower, work: EncodeWork) -> None:
        digest = work.digest
        if work.first == 0:
            image = self._images.get(digest)
            if image is None:
                raise MissingImageError
            self._begun[digest] = tower.begin(image)
        encoding = self._begun[digest]
        tower.advance(encoding, work.end)
        if work.end == tower.num_passes(encoding):
            self._encoded[digest] = tower.finish(self._begun.pop(digest))

    def inputs(self, plan: StepPlan, sequences: Values[BatchSequence], layout: HostStep) -> MediaInputs | None:
        """Return what the images of a step's tokens give the model; None where no token is of an image.

        All who share call it, in the same order.
        """
        places: list[Int64s] = []
        parts: list[tuple[bytes, slice]] = []
        bidirectional: list[BidirectionalSpan] = []
        # Decodes compute text, and stand first.
        others = zip(sequences[plan.num_decodes :], plan.starts[plan.num_decodes :], plan.lengths, strict=True)
        for number, (sequence, start, length) in enumerate(others, start=plan.num_decodes):
            first = int(layout.query_starts[number])
            for span in sequence.media:
                if span.start >= start + length or span.end <= start:
                    continue
                begin, end = max(start, span.start), min(start + length, span.end)
                inside, part = self._part(sequence, span, begin, end)
                places.append(inside + (first + begin - start))
                parts.append((span.digest, part))
                if span.is_bidirectional:
                    bidirectional.append(BidirectionalSpan(number, first + begin - start, first + end - start, begin))
        if not places:
            return None
        index = torch.from_numpy(np.concatenate(places)).to(self._like.device)
        joined = self._joined(parts, len(index))
        positions = None
        if self._rotary_axes is not None:
            starts = [int(start) for start in layout.query_starts]
            on_axes = [
                axis_positions(sequence.media, start, end - first)
                for sequence, start, (first, end) in zip(sequences, plan.starts, pairwise(starts), strict=True)
            ]
            positions = torch.from_numpy(np.concatenate(on_axes, axis=1)).to(self._like.device)
        return MediaInputs(index, joined[0], tuple(joined[1:]), positions, self._rotary_axes, bidirectional)

    def _joined(self, parts: Values[tuple[bytes, slice]], num_rows: int) -> list[torch.Tensor]:
        """Return embeddings of parts of images, and the deep ones."""
        if self._tower is None:
            joined = [self._like.new_empty(num_rows, len(self._like)) for _ in range(self._num_outputs)]
        else:
            outputs = [(self._encoded[digest], chosen) for digest, chosen in parts]
            each = ([part[chosen] for part in (image.rows, *image.deep)] for image, chosen in outputs)
            joined = list(map(torch.cat, zip(*each, strict=True)))
        for rows in joined if num_rows else ():
            # As bytes, since what shares them may not know all types.
            self._share(rows.view(torch.uint8))
        return joined

    def _part(self, sequence: BatchSequence, span: MediaSpan, begin: int, end: int) -> tuple[Int64s, slice]:
        """Return which of the tokens from `begin` to before `end` embeddings replace, and which of the image's."""
        is_row = np.array(sequence.token_ids[span.start : end], dtype=np.int64) == self._image_token
        first = int(is_row[: begin - span.start].sum())
        inside: Int64s = np.flatnonzero(is_row[begin - span.start :]).astype(np.int64)
        return inside, slice(first, first + len(inside))
