"""Headers of images, read as Pillow reads them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from PIL import Image, ImageOps

from shared.image_header import ImageProblemError, read_header
from tests.images import MIMES, encoded, opened, picture, png_of_size, turned

FILES = {
    **{
        f"{kind} {mode}": encoded(picture().convert(mode), kind) for kind in ("PNG", "WEBP", "GIF") for mode in ("RGB",)
    },
    **{f"PNG {mode}": encoded(picture().convert(mode)) for mode in ("L", "P", "1", "RGBA", "LA")},
    **{f"JPEG {mode}": encoded(picture().convert(mode), "JPEG") for mode in ("RGB", "L", "CMYK")},
    "JPEG progressive": encoded(picture(), "JPEG", progressive=True),
    "WEBP lossless": encoded(picture(), "WEBP", lossless=True),
    "WEBP with alpha": encoded(picture().convert("RGBA"), "WEBP"),
    "WEBP of one pixel": encoded(picture(1, 1), "WEBP"),
    **{f"turned {n} {kind}": turned(picture(), n, kind) for n in range(9) for kind in ("JPEG", "PNG", "WEBP")},
}


@pytest.mark.parametrize("name", FILES)
def test_header_says_what_pillow_finds(name: str) -> None:
    header, image = read_header(FILES[name]), opened(FILES[name])
    assert header.mime == MIMES[image.format or ""]
    assert (header.stored_width, header.stored_height) == image.size
    assert (header.width, header.height) == ImageOps.exif_transpose(image).size


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_images_are_refused(kind: str) -> None:
    animated = encoded(picture(), kind, save_all=True, append_images=[picture(seed=1)], duration=50)
    with pytest.raises(ImageProblemError, match="is animated"):
        read_header(animated)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encoded(Image.new("I;16", (4, 4))), "has 16 bits a channel"),
        (png_of_size(8, 8, bits=16), "has 16 bits a channel"),
        (png_of_size(2**31, 1), "has 2147483648x1 pixels; a side may have 1 to 32768"),
        (png_of_size(2**32 - 1, 2**32 - 1), "has 4294967295x4294967295 pixels"),
        (png_of_size(0, 5), "has 0x5 pixels"),
        (b"", "is not a PNG, JPEG, WebP or GIF"),
        (b"BM" + bytes(100), "is not a PNG, JPEG, WebP or GIF"),
        (bytes(4) + b"ftypavif" + bytes(20), "is of the format AVIF; convert it to JPEG first"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a PNG, JPEG, WebP or GIF"),
        (b"\xff\xd8\xff\xd9" + bytes(10), "is a JPEG without a frame"),
        (b"\xff\xd8\xff\xc3\x00\x11\x08\x00\x01\x00\x01", "a JPEG of a kind that is not read"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "is a GIF without a frame"),
        (b"GIF87a\x01\x00\x01\x00\x00\x00\x00;", "is a GIF without a frame"),
    ],
)
def test_images_that_are_not_read_say_why(data: bytes, problem: str) -> None:
    with pytest.raises(ImageProblemError, match=problem):
        read_header(data)


def test_headers_of_many_parts_are_refused_before_all_are_read() -> None:
    gif = b"GIF89a\x01\x00\x01\x00\x00\x00\x00"
    for blocks in (b"\x21\x01\x00" * 200_000, b"\x21\x01" + b"\x01\x01" * 200_000 + b"\x00"):
        with pytest.raises(ImageProblemError, match="has more than 131072 blocks"):
            read_header(gif + blocks + b"\x2c" + bytes(8) + b"\x00\x02\x00;")
    assert read_header(gif + b"\x21\x01" + b"\x01\x01" * 1000 + b"\x00\x2c" + bytes(9) + b"\x02\x00;").width == 1


class Counted(bytes):
    """Bytes that know how often one was looked at."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(key)


def test_fill_bytes_of_a_jpeg_are_passed_at_once() -> None:
    jpeg = FILES["JPEG RGB"]
    filled = Counted(jpeg[:2] + b"\xff" * 100_000 + jpeg[2:])
    assert read_header(filled) == read_header(jpeg)
    assert filled.num_read < 100
    with pytest.raises(ImageProblemError, match="is a JPEG without a frame"):
        read_header(b"\xff\xd8" + b"\xff" * 1000)


@pytest.mark.parametrize("name", FILES)
def test_cut_and_changed_files_are_read_or_refused_and_nothing_else(name: str) -> None:
    whole, chance = FILES[name], random.Random(name)
    for _ in range(200):
        data = bytearray(whole[: chance.randrange(len(whole) + 1)])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            header = read_header(bytes(data))
        except ImageProblemError:
            continue
        assert 1 <= header.width <= 1 << 15
        assert 1 <= header.height <= 1 << 15
