"""Which tokens of a step are images', and which embeddings replace them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import EncodeWork, StepPlan
from gpu_worker.execution.encoder import ImageEncoder, MissingImageError
from gpu_worker.layers.media_inputs import BidirectionalSpan
from gpu_worker.models.vision.tower import EncodedImage
from shared.sampling import Sampling

IMAGE, TEXT = 9, 1
PARTIAL, WHOLE, BEFORE, BEHIND = (bytes([number]) for number in range(4))
ROWS = {PARTIAL: 10.0, WHOLE: 20.0}


class Tower:
    """Two passes make an image of four embeddings of one number each."""

    def begin(self, image: float) -> Any:
        return SimpleNamespace(value=image, num_done=0)

    def advance(self, encoding: Any, end: int) -> None:
        encoding.num_done = end

    def num_passes(self, encoding: Any) -> int:
        return 2

    def finish(self, encoding: Any) -> EncodedImage:
        assert encoding.num_done == 2
        rows = encoding.value + torch.arange(4.0)[:, None]
        return EncodedImage(rows, (rows * 2,))


def encoder_of(images: dict[bytes, float]) -> ImageEncoder:
    tower: Any = Tower()
    store: Any = images
    vision: Any = SimpleNamespace(form=SimpleNamespace(token=IMAGE), deep={0: None}, rotary_axes=())
    return ImageEncoder(vision, tower, store, torch.empty(1))


def seeing_sequence() -> BatchSequence:
    tokens = [IMAGE] * 2 + [IMAGE, IMAGE, TEXT, IMAGE, IMAGE] + [TEXT] * 2 + [IMAGE] * 2 + [IMAGE] * 2
    spans = (
        MediaSpan(0, 2, BEFORE, 2),
        MediaSpan(2, 5, PARTIAL, 4),
        MediaSpan(9, 2, WHOLE, 2, is_bidirectional=True),
        MediaSpan(11, 2, BEHIND, 2),
    )
    return BatchSequence(1, "seeing", tokens, len(tokens), Sampling(), media=spans)


def test_tokens_of_a_step_get_the_rows_of_their_images_and_separators_get_none() -> None:
    encoder = encoder_of(ROWS)
    encoder.encode(StepPlan(0, [], [], 0, encodes=[EncodeWork(PARTIAL, 0, 2), EncodeWork(WHOLE, 0, 1)]))
    encoder.encode(StepPlan(1, [], [], 0, encodes=[EncodeWork(WHOLE, 1, 2)]))
    decode = BatchSequence(0, "decode", [TEXT] * 4, 3, Sampling())
    # A decode, and the tokens 4 to before 11 of the sequence that sees.
    plan = StepPlan(2, [0, 1], [3, 4], 8, num_decodes=1, lengths=[7])
    layout: Any = SimpleNamespace(query_starts=[0, 1, 8])
    inputs = encoder.inputs(plan, [decode, seeing_sequence()], layout)
    assert inputs is not None
    assert inputs.places.tolist() == [2, 3, 6, 7]
    assert inputs.rows[:, 0].tolist() == [12.0, 13.0, 20.0, 21.0]
    assert [deep[:, 0].tolist() for deep in inputs.deep] == [[24.0, 26.0, 40.0, 42.0]]
    assert list(inputs.bidirectional) == [BidirectionalSpan(1, 6, 8, 9)]
    assert (inputs.positions, inputs.rotary_axes) == (None, None)
    # A step that ends in the middle of an image.
    layout.query_starts = [0, 2]
    inputs = encoder.inputs(StepPlan(3, [1], [4], 2, lengths=[2]), [seeing_sequence()], layout)
    assert inputs is not None
    assert (inputs.places.tolist(), inputs.rows.tolist()) == ([1], [[12.0]])


def test_step_of_text_alone_has_no_inputs() -> None:
    layout: Any = SimpleNamespace(query_starts=[0, 2])
    assert encoder_of({}).inputs(StepPlan(0, [0], [7], 2, lengths=[2]), [seeing_sequence()], layout) is None


def test_image_is_encoded_anew_after_it_was_forgotten_and_needs_its_pixels() -> None:
    images = dict(ROWS)
    encoder = encoder_of(images)
    work = [EncodeWork(WHOLE, 0, 2)]
    encoder.encode(StepPlan(0, [], [], 0, encodes=work))
    encoder.encode(StepPlan(1, [], [], 0, forgotten=[WHOLE]))
    assert not encoder._encoded
    del images[WHOLE]
    with pytest.raises(MissingImageError, match="not there any more"):
        encoder.encode(StepPlan(2, [], [], 0, encodes=work))
