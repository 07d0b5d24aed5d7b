"""Images in a sequence: where they stand, what names them, and the pixels that the runner encodes. Values only.

An image stands in a prompt as a run of tokens. Embeddings that a vision tower makes of its pixels replace those of some
or all of these tokens. A digest of the image's bytes and of how they are processed names both: what has the same digest
is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct as Packing
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct

_PLACE = Packing("<q").pack


class MediaSpan(Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """An image in a sequence.

    Attributes:
        start: Place of its first token in the sequence.
        length: Its tokens, separators between rows or tiles included.
        digest: Of the image's bytes, the processor and the detail, and of what shares it, 32 bytes.
        num_rows: Embeddings that the tower makes of it.
        token_grid: Rows and columns of its tokens, where positions have several axes; else empty.
        num_patches: Of a tile, each of which attends to all of them; the embeddings are made of them in equal parts.
        is_bidirectional: Its tokens attend to one another in both directions, so one step computes all of them.
    """

    start: int
    length: int
    digest: bytes
    num_rows: int
    token_grid: tuple[int, ...] = ()
    num_patches: int = 0
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        """Place behind its last token."""
        return self.start + self.length

    @property
    def num_positions(self) -> int:
        """By how much the position of what follows is higher: an image of several axes counts its longer side."""
        return max(self.token_grid) if self.token_grid else self.length


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PreparedImage:
    """Pixels in the size that a tower reads.

    Attributes:
        values: NumPy array, `[num_tiles, height, width, 3]` uint8.
        patch_grid: Rows and columns of tiles or patches, as the family counts them.
    """

    digest: bytes
    values: Any
    patch_grid: tuple[int, ...]
    num_rows: int


def media_key(spans: Iterable[MediaSpan], first: int, end: int) -> bytes:
    """Return what tells apart blocks of the same tokens: the images in places `first` to before `end`, and where.

    An image is placed relative to the block, so that the key names the part of the image that the block holds. Its grid
    decides its positions, and so its keys.
    """
    inside = (span for span in spans if span.start < end and span.end > first)
    return b"".join(
        span.digest + _PLACE(first - span.start) + b"".join(_PLACE(side) for side in span.token_grid) for span in inside
    )


class SharedImages:
    """The pixels of a scheduler's sequences, for a runner in the same process.

    Sequences own them: those that show the same image own one object, so it lasts as long as any of them.
    """

    def __init__(self) -> None:
        self._by_digest: WeakValueDictionary[bytes, PreparedImage] = WeakValueDictionary()

    def share(self, images: Iterable[PreparedImage]) -> tuple[PreparedImage, ...]:
        """Offer the images of a sequence; return those to own: other sequences' objects, where these have the same."""
        return tuple(self._by_digest.setdefault(image.digest, image) for image in images)

    def get(self, digest: bytes) -> PreparedImage | None:
        """Return an image; None when no sequence has it any more."""
        return self._by_digest.get(digest)
