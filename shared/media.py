"""Images of a request, as they travel: by the digest of their bytes, which lie in the media store of their tenant."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_IMAGE_BYTES, MAX_IMAGE_SIDE, MAX_IMAGES, MAX_MESSAGES
from shared.errors import BadRequestError

DIGEST_BYTES = 32
"""Of SHA-256."""

IMAGE_PARAM = "media"
"""What a worker's error about images names; `media.[1]` where it is about the second one of the request."""
IMAGE_NOT_FOUND = "image_not_found"
"""Error code of a request whose image is no longer stored."""
IMAGES_BUSY = "images_busy"
"""Error code of a request whose image takes long to decode, while many others do."""

Detail = Literal["auto", "low", "high"]
Mime = Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
Side = Annotated[int, Meta(ge=1, le=MAX_IMAGE_SIDE)]


def about_image(error: BadRequestError, index: int, num_images: int) -> BadRequestError:
    """Return an error about one of a request's images with its place among them."""
    message = f"Image {index + 1} of {num_images}: {error}" if num_images > 1 else str(error)
    return BadRequestError(message, f"{IMAGE_PARAM}.[{index}]", error.code)


class MediaRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image that a request refers to. The sender claims these facts; the worker checks them.

    Attributes:
        digest: SHA-256 of the bytes as they are stored.
        num_bytes: Their number.
        width: Of the decoded image after its EXIF orientation, in pixels.
        height: The same.
        detail: How finely the client wants it to be seen.
    """

    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_IMAGE_BYTES)]
    width: Side
    height: Side
    mime: Mime
    kind: Literal["image"] = "image"
    detail: Detail = "auto"


class ContentImage(Struct, frozen=True):
    """Place of an image in a message's content: texts before it, and its index in the request's `media`."""

    num_parts_before: Annotated[int, Meta(ge=0, le=MAX_MESSAGES)]
    index: Annotated[int, Meta(ge=0, le=MAX_IMAGES - 1)]


Media = Annotated[tuple[MediaRef, ...], Meta(max_length=MAX_IMAGES)]
