"""From images to a model's input: how many tokens each takes, their pixels in size, and the prompt with their tokens.

Needs the configuration only: no weights. What differs between families is an `ImageForm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from gpu_worker.core.media import MediaSpan, PreparedImage
from shared.errors import BadRequestError
from shared.media import Detail, MediaRef, about_image

Pixels = npt.NDArray[np.uint8]
Resampling = Literal["bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What becomes of an image of some size.

    Attributes:
        token_ids: Stand in the prompt for the image's placeholder.
        span: The first of these that belongs to the image, and behind the last.
        num_rows: Embeddings that the tower makes.
        patch_grid: As of `PreparedImage`.
        tile_size: Height and width of each tile in pixels.
        token_grid: As of `MediaSpan`.
        num_tiles: Parts of equal size, whose patches do not see those of the others.
    """

    token_ids: list[int]
    span: tuple[int, int]
    num_rows: int
    patch_grid: tuple[int, ...]
    tile_size: tuple[int, int]
    num_patches: int
    token_grid: tuple[int, ...] = ()
    num_tiles: int = 1


@dataclass(frozen=True, slots=True)
class ImageForm(ABC):
    """How a family reads images.

    Attributes:
        token: The prompt's token that an embedding replaces.
        is_bidirectional: An image's tokens attend to one another in both directions.
        around: What a chat template writes for an image as text, and what it stands for; None: it stands for itself.
        resampling: The filter that resizes them.
    """

    resampling: ClassVar[Resampling] = "bicubic"

    token: int
    is_bidirectional: bool = field(default=False, kw_only=True)
    around: tuple[str, str] | None = field(default=None, kw_only=True)

    @property
    def placeholder(self) -> int:
        """The token that a chat template writes for each image."""
        return self.token

    @abstractmethod
    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """Plan an image; `BadRequestError` if the model cannot read this size."""

    @abstractmethod
    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """Return `[num_tiles, height, width, 3]` of an image, `[height, width, 3]`."""

    @abstractmethod
    def largest(self) -> tuple[int, int]:
        """Return the embeddings and the patches of the largest image."""


class MediaProcessor:
    """Prepares the images of one model. Keeps no state; any thread may use it."""

    def __init__(self, form: ImageForm, fingerprint: bytes) -> None:
        self._form = form
        self._fingerprint = fingerprint

    def spelled(self, text: str) -> str:
        """Return a rendered prompt with the text that the model was trained with around each image.

        Call it before tokenizing: texts on both sides may become one token.
        """
        return text if self._form.around is None else text.replace(*self._form.around)

    def num_tokens(self, ref: MediaRef) -> int:
        """Return how many prompt tokens stand for an image; `BadRequestError` if the model cannot read this size."""
        return len(self._plan(ref.width, ref.height, ref.detail).token_ids)

    def digest(self, ref: MediaRef) -> bytes:
        """Return what names the image as this model reads it, 32 bytes."""
        detail = "low" if ref.detail == "low" else "high"
        return sha256(ref.digest + self._fingerprint + detail.encode()).digest()

    def prepared_bytes(self, ref: MediaRef) -> int:
        """Return the memory of a prepared image; `BadRequestError` if the model cannot read this size."""
        plan = self._plan(ref.width, ref.height, ref.detail)
        return 3 * plan.num_tiles * plan.tile_size[0] * plan.tile_size[1]

    def prepare(self, ref: MediaRef, pixels: Pixels) -> PreparedImage:
        """Resize an image, RGB `[height, width, 3]`, for the tower; takes milliseconds, without the interpreter's lock.

        Raises:
            BadRequestError: The model cannot read this size, or it is not the size that `ref` says.
        """
        height, width = pixels.shape[:2]
        if (width, height) != (ref.width, ref.height) or pixels.shape[2:] != (3,) or pixels.dtype != np.uint8:
            raise BadRequestError(f"The image has {width}x{height} pixels, not {ref.width}x{ref.height}.", "messages")
        plan = self._plan(width, height, ref.detail)
        return PreparedImage(self.digest(ref), self._form.resized(pixels, plan), plan.patch_grid, plan.num_rows)

    def expand(self, token_ids: Sequence[int], refs: Sequence[MediaRef]) -> tuple[list[int], list[MediaSpan]]:
        """Replace each placeholder by the tokens of its image, in order; also return where each image is.

        Raises:
            BadRequestError: Placeholders and images differ in number, or an image is too odd or ends the prompt.
        """
        form, expanded, spans = self._form, list[int](), list[MediaSpan]()
        places = [place for place, token_id in enumerate(token_ids) if token_id == form.placeholder]
        if len(places) != len(refs):
            problem = f"The prompt has {len(places)} places for images and {len(refs)} images; they must be as many."
            raise BadRequestError(problem, "messages")
        done = 0
        for number, (place, ref) in enumerate(zip(places, refs, strict=True)):
            expanded += token_ids[done:place]
            try:
                plan = self._plan(ref.width, ref.height, ref.detail)
            except BadRequestError as error:
                raise about_image(error, number, len(refs)) from error
            first, end = plan.span
            spans.append(
                MediaSpan(
                    len(expanded) + first,
                    end - first,
                    self.digest(ref),
                    plan.num_rows,
                    plan.token_grid,
                    plan.num_patches // plan.num_tiles,
                    form.is_bidirectional,
                )
            )
            expanded += plan.token_ids
            done = place + 1
        expanded += token_ids[done:]
        if spans and spans[-1].end == len(expanded):
            raise BadRequestError("The prompt ends with an image; text must follow it.", "messages")
        return expanded, spans

    def _plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        return self._form.plan(width, height, "low" if detail == "low" else "high")
