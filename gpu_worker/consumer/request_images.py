"""The images of a request on their way into a sequence: references, the tokens that stand for them, pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Protocol

from msgspec import structs

from gpu_worker.core.media import MediaSpan, PreparedImage
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.media.prepared_images import PreparedImages, Preparer
from shared.bounds import MAX_IMAGES
from shared.conversation import Messages
from shared.errors import BadRequestError, PromptTooLongError
from shared.media import MediaRef
from shared.messages import Request


class ImageProcessor(Preparer, Protocol):
    """How a model reads images."""

    def expand(self, token_ids: Sequence[int], refs: Sequence[MediaRef]) -> tuple[list[int], list[MediaSpan]]:
        """Return a prompt with the tokens of its images, and where each is.

        Raises:
            BadRequestError: It has more or fewer places for images than images, or the model cannot read one.
        """


class RequestImages:
    """Reads the images of requests for a model that sees. Keeps nothing of a request."""

    def __init__(self, processor: ImageProcessor, prepared: PreparedImages, max_model_len: int) -> None:
        self._processor = processor
        self._prepared = prepared
        self._max_model_len = max_model_len

    def expanded(self, request: Request, token_ids: Sequence[int]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt of a request with the tokens of its images, and where each is; no image is looked at.

        Raises:
            BadRequestError: The template shows other images, the model cannot read one, or all together are too long.
        """
        expanded, spans = self._processor.expand(token_ids, shown(request.messages or (), request.media))
        if len(expanded) >= self._max_model_len:
            raise PromptTooLongError(len(expanded), self._max_model_len, "messages")
        return expanded, spans

    async def prepared(self, request: Request, is_wanted: Callable[[], bool]) -> list[PreparedImage]:
        """Return the images of a request, in their order; it raises as `PreparedImages.images` does."""
        return await self._prepared.images(request.tenant, shown(request.messages or (), request.media), is_wanted)

    async def close(self) -> None:
        """End what decodes."""
        await self._prepared.close()


def give(sequence: EngineSequence, spans: Sequence[MediaSpan], images: Sequence[PreparedImage]) -> None:
    """Let a sequence have its images; `BadRequestError` if one is not what its reference says.

    Embeddings are found by digest, and a hit is quick: with the sequence's salt in the digest, a tenant cannot measure
    whether another one has shown an image, as with prefixes.
    """
    for number, (span, image) in enumerate(zip(spans, images, strict=True), 1):
        if (span.digest, span.num_rows) != (image.digest, image.num_rows):
            message = f"Image {number} of {len(spans)} is not what its reference in 'media' says."
            raise BadRequestError(message, "media", "invalid_image")
    names = [sha256(sequence.salt + span.digest).digest() for span in spans]
    sequence.media = tuple(structs.replace(span, digest=name) for span, name in zip(spans, names, strict=True))
    sequence.images = tuple(replace(image, digest=name) for image, name in zip(images, names, strict=True))


def shown(messages: Messages, media: Sequence[MediaRef]) -> list[MediaRef]:
    """Return what messages show, in that order.

    Raises:
        BadRequestError: An image is not among `media`, or too many are shown: each takes thousands of tokens, one that
            is shown before too.
    """
    images = (sorted(message.images, key=lambda image: image.num_parts_before) for message in messages)
    indices = [image.index for several in images for image in several]
    if len(indices) > MAX_IMAGES:
        raise BadRequestError(f"messages: {len(indices)} images are shown; at most {MAX_IMAGES} are read.", "messages")
    if indices and max(indices) >= len(media):
        message = f"messages: image number {max(indices)} is shown, and 'media' has {len(media)}, counted from 0."
        raise BadRequestError(message, "messages")
    return [media[index] for index in indices]


def check_images(request: Request) -> None:
    """Refuse images with `BadRequestError` but in a conversation to go on with, whose prompt is not to be cut."""
    if request.messages is None or request.pooling is not None:
        raise BadRequestError("media: only a conversation that is answered may show images.", "media")
    if request.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens: a prompt with images is not cut. Leave it out."
        raise BadRequestError(message, "truncate_prompt_tokens")
    shown(request.messages, request.media)
