"""What the first bytes of an image say of it: format, size, orientation. Nothing is decoded.

A gateway reads headers before it stores an image, and a worker again before it decodes one. Orientation is EXIF's, as
the file's own metadata hold it: 1 to 8, of which 5 to 8 swap width and height.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shared.bounds import MAX_IMAGE_SIDE
from shared.errors import HeadraceError
from shared.media import Mime

PNG: Mime = "image/png"
JPEG: Mime = "image/jpeg"
WEBP: Mime = "image/webp"
GIF: Mime = "image/gif"
# Of EXIF within a JPEG or PNG: a segment has at most as many.
_MAX_EXIF_BYTES = 1 << 16
_MAX_SEGMENTS = 4096
# A GIF of 32 MB has about this many, if they are full.
_MAX_GIF_BLOCKS = 1 << 17
_NO_FILL = re.compile(rb"[^\xff]")
_ORIENTATION = 0x0112
_SWAPPING = frozenset({5, 6, 7, 8})
# Start of frame: baseline, extended, progressive. Those with differential or lossless coding are not.
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
# What phones and browsers save, and nothing here decodes.
_HEIF_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}


class ImageProblemError(HeadraceError):
    """An image cannot be read. The message completes the sentence 'The image ...'."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image as it is stored: its sides in pixels before it is turned, and how (1 to 8)."""

    mime: Mime
    stored_width: int
    stored_height: int
    orientation: int = 1

    @property
    def width(self) -> int:
        """As it is shown, in pixels."""
        return self.stored_height if self.orientation in _SWAPPING else self.stored_width

    @property
    def height(self) -> int:
        """As it is shown, in pixels."""
        return self.stored_width if self.orientation in _SWAPPING else self.stored_height


def read_header(data: bytes) -> ImageHeader:
    """Read the header of an image; `ImageProblemError` if it is broken, animated, or of a form that is not read."""
    try:
        header = _read(data)
    except (struct.error, IndexError):
        raise ImageProblemError("is broken: it ends within its header.") from None
    sides = (header.stored_width, header.stored_height)
    if not all(1 <= side <= MAX_IMAGE_SIDE for side in sides):
        raise ImageProblemError(f"has {sides[0]}x{sides[1]} pixels; a side may have 1 to {MAX_IMAGE_SIDE}.")
    return header


def _read(data: bytes) -> ImageHeader:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif(data)
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        raise ImageProblemError(f"is of the format {_HEIF_BRANDS[data[8:12]]}; convert it to JPEG first.")
    raise ImageProblemError("is not a PNG, JPEG, WebP or GIF.")


def _png(data: bytes) -> ImageHeader:
    length, kind, width, height, bits = struct.unpack_from(">I4sIIB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ImageProblemError("is broken: it is a PNG without a header.")
    if bits == 16:
        raise ImageProblemError("has 16 bits a channel; 8 are read. Convert it.")
    orientation = 1
    for name, start, size in _png_chunks(data):
        if name == b"acTL":
            raise ImageProblemError("is animated. Send one frame.")
        if name == b"eXIf":
            orientation = _exif_orientation(data[start : start + min(size, _MAX_EXIF_BYTES)])
        if name == b"IDAT":
            break
    return ImageHeader(PNG, width, height, orientation)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 8
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(data):
            return
        size, name = struct.unpack_from(">I4s", data, at)
        yield name, at + 8, size
        at += 12 + size


def _jpeg(data: bytes) -> ImageHeader:
    at, orientation = 2, 1
    for _ in range(_MAX_SEGMENTS):
        found = _NO_FILL.search(data, at)
        if found is None:
            break
        marker, at = data[found.start()], found.end()
        if marker in _WITHOUT_LENGTH:
            continue
        (size,) = struct.unpack_from(">H", data, at)
        if marker in _FRAMES:
            bits, height, width = struct.unpack_from(">BHH", data, at + 2)
            if bits != 8:
                raise ImageProblemError(f"has {bits} bits a channel; 8 are read. Convert it.")
            return ImageHeader(JPEG, width, height, orientation)
        if marker in _OTHER_FRAMES:
            raise ImageProblemError("is a JPEG of a kind that is not read: send a baseline or progressive one.")
        if marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0":
            orientation = _exif_orientation(data[at + 8 : at + size])
        if marker in (0xDA, 0xD9) or size < 2:
            break
        at += size
        if data[at] != 0xFF:
            break
    raise ImageProblemError("is broken: it is a JPEG without a frame.")


def _webp(data: bytes) -> ImageHeader:
    kind, at = data[12:16], 20
    if kind == b"VP8 " and data[at + 3 : at + 6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, at + 6)
        return ImageHeader(WEBP, width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L" and data[at] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, at + 1)
        return ImageHeader(WEBP, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X":
        raise ImageProblemError("is broken: it is a WebP without a frame.")
    flags = data[at]
    if flags & 0x02:
        raise ImageProblemError("is animated. Send one frame.")
    width, height = (1 + int.from_bytes(data[start : start + 3], "little") for start in (at + 4, at + 7))
    if len(data) < at + 10:
        raise IndexError
    return ImageHeader(WEBP, width, height, _webp_orientation(data) if flags & 0x08 else 1)


def _webp_orientation(data: bytes) -> int:
    at = 12
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(data):
            break
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            exif = data[at + 8 : at + 8 + min(size, _MAX_EXIF_BYTES)]
            return _exif_orientation(exif.removeprefix(b"Exif\0\0"))
        at += 8 + size + (size & 1)
    return 1


def _gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, num_frames, num_blocks = 13 + _table_bytes(flags), 0, 0
    while at < len(data) and data[at] != 0x3B:
        if data[at] == 0x21:
            at, num_blocks = _behind_blocks(data, at + 2, num_blocks)
        elif data[at] == 0x2C:
            num_frames += 1
            if num_frames > 1:
                raise ImageProblemError("is animated. Send one frame.")
            at, num_blocks = _behind_blocks(data, at + 11 + _table_bytes(data[at + 9]), num_blocks)
        else:
            break
    if not num_frames:
        raise ImageProblemError("is broken: it is a GIF without a frame.")
    return ImageHeader(GIF, width, height)


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int, num_blocks: int) -> tuple[int, int]:
    """Return where a run of sub-blocks ends, or the end of the data; and the number of blocks with these."""
    while at < len(data) and num_blocks <= _MAX_GIF_BLOCKS:
        at, size, num_blocks = at + 1 + data[at], data[at], num_blocks + 1
        if not size:
            break
    if num_blocks > _MAX_GIF_BLOCKS:
        raise ImageProblemError(f"has more than {_MAX_GIF_BLOCKS} blocks, which is the most that is read of a GIF.")
    return at, num_blocks


def _exif_orientation(exif: bytes) -> int:
    """Return the orientation that EXIF tells; 1 if it tells none that there is."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 8:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, at)
        for number in range(num_entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * number)
            if (tag, kind, count) == (_ORIENTATION, 3, 1):
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
