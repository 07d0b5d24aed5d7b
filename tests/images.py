"""Encoded images for tests, made by Pillow or by hand."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from typing import Any, cast

import numpy as np
from PIL import Image

from shared.image_header import read_header
from shared.media import MediaRef

MIMES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return a smooth image that no turn maps to itself."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 5 + seed * 40) % 256, (y * 7 + seed * 11) % 256, (x + 2 * y) % 256]
    return Image.fromarray(np.stack(channels, 2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def turned(image: Image.Image, orientation: int, kind: str = "JPEG") -> bytes:
    """Return an image whose metadata ask for a turn."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes(), **({"lossless": True} if kind == "WEBP" else {}))


def png_of_size(width: int, height: int, bits: int = 8, data: bytes = b"") -> bytes:
    """Return a PNG whose header says this, whatever it holds."""
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
        + _chunk(b"IDAT", zlib.compress(data))
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def scans_added(jpeg: bytes, count: int, filler: bytes = b"") -> bytes:
    """Return a progressive JPEG whose last scan comes again and again; `filler` stands before each."""
    at = jpeg.rindex(b"\xff\xda")
    end = jpeg.index(b"\xff\xd9", at)
    return jpeg[:end] + (filler + jpeg[at:end]) * count + jpeg[end:]


def reference(data: bytes, **fields: Any) -> MediaRef:
    header = read_header(data)
    whole: dict[str, Any] = {
        "digest": hashlib.sha256(data).digest(),
        "num_bytes": len(data),
        "width": header.width,
        "height": header.height,
        "mime": header.mime,
    }
    return MediaRef(**{**whole, **fields})


def opened(data: bytes) -> Image.Image:
    return cast("Image.Image", Image.open(io.BytesIO(data)))
