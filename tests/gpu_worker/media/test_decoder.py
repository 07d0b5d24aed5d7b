"""Images decoded in the limited process, compared with Pillow's own reading."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image, ImageOps

from gpu_worker.media.decode_process import LIMITS, DecodeWork, _decode
from gpu_worker.media.decoder import Decoder, SlowImageError
from shared.errors import BadRequestError
from shared.image_header import ImageProblemError
from shared.limited_process import Outcome
from tests.images import encoded, opened, picture, png_of_size, reference, scans_added, turned


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def decoder() -> AsyncIterator[Decoder]:
    decoder = Decoder()
    yield decoder
    await decoder.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {
    "PNG": encoded(picture()),
    "JPEG": encoded(picture(), "JPEG"),
    "JPEG CMYK": encoded(picture().convert("CMYK"), "JPEG"),
    "JPEG with a second picture, as of phones": encoded(
        picture(), "MPO", save_all=True, append_images=[picture(20, 15, 1)]
    ),
    "JPEG grey": encoded(picture().convert("L"), "JPEG"),
    "WEBP": encoded(picture(), "WEBP"),
    "GIF": encoded(picture(), "GIF"),
    "palette": encoded(picture().convert("P")),
    **{f"turned {n} {kind}": turned(picture(), n, kind) for n in range(1, 9) for kind in ("JPEG", "WEBP")},
    "turned PNG": turned(picture(), 6, "PNG"),
}


@pytest.mark.parametrize("name", FILES)
async def test_pixels_are_those_that_pillow_shows(decoder: Decoder, name: str) -> None:
    data = FILES[name]
    pixels = await decoder.decode(reference(data), data)
    expected = np.asarray(ImageOps.exif_transpose(opened(data)).convert("RGB"))
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, expected)


async def test_where_no_file_is_in_memory_alone_the_other_one_is_removed(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pixels = await decoder.decode(reference(FILES["PNG"]), FILES["PNG"])
    np.testing.assert_array_equal(pixels, np.asarray(picture()))
    assert not os.listdir(tmp_path)


async def test_what_is_transparent_is_white(decoder: Decoder) -> None:
    image = picture(4, 4).convert("RGBA")
    image.putpixel((1, 2), (9, 9, 9, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([1, 2, 3, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    clear = encoded(palette, transparency=0)
    pixels = await decoder.decode(reference(encoded(image)), encoded(image))
    assert pixels[2, 1].tolist() == [255, 255, 255]
    assert pixels[0, 0].tolist() == list(picture(4, 4).getpixel((0, 0)))  # type: ignore[arg-type]
    assert (await decoder.decode(reference(clear), clear)).tolist() == [[[255, 255, 255], [200, 100, 50]]]


async def test_reference_that_says_something_else_is_refused(decoder: Decoder) -> None:
    data = encoded(picture())
    for wrong in ({"width": 41}, {"height": 1}, {"mime": "image/jpeg"}):
        with pytest.raises(BadRequestError, match="is image/png of 40x30; its reference says"):
            await decoder.decode(reference(data, **wrong), data)


async def test_bomb_takes_no_more_than_it_may(decoder: Decoder) -> None:
    # 16 GB of pixels in 30 kB; and a PNG of a size that it does not have.
    bomb = png_of_size(1 << 15, 1 << 15, data=bytes(1 << 25))
    with pytest.raises(BadRequestError, match="takes more than 1024 MB to be decoded"):
        await decoder.decode(reference(bomb), bomb)
    short = png_of_size(500, 500, data=bytes(100))
    with pytest.raises(BadRequestError, match="The image is broken"):
        await decoder.decode(reference(short), short)


async def test_form_that_no_decoder_knows_is_refused_without_naming_a_file(decoder: Decoder) -> None:
    for data in (png_of_size(10, 10, bits=3), FILES["JPEG"].replace(b"\x00\x1e\x00\x28\x03", b"\x00\x1e\x00\x28\xff")):
        with pytest.raises(
            BadRequestError, match=r"^The image is broken: what follows its header is no (PNG|JPEG) that"
        ):
            await decoder.decode(reference(data), data)


async def test_jpeg_of_many_scans_is_refused_before_it_is_decoded(decoder: Decoder) -> None:
    data = scans_added(encoded(picture(2000, 2000), "JPEG", progressive=True), 300)
    started = time.monotonic()
    with pytest.raises(BadRequestError, match=r"The image has more than 64 scans. Save it as a baseline JPEG\."):
        await decoder.decode(reference(data), data)
    assert time.monotonic() - started < LIMITS.time_s / 2


async def test_scans_of_the_image_alone_are_counted(decoder: Decoder) -> None:
    """A thumbnail in the metadata, and what follows the image, have scans of their own."""
    usual = encoded(picture(), "JPEG", progressive=True)
    others = b"\xff\xe2" + (2 + 2 * 100).to_bytes(2) + b"\xff\xda" * 100
    for data in (scans_added(usual, 40), usual[:2] + others + usual[2:] + b"\xff\xda" * 100):
        expected = np.asarray(opened(data).convert("RGB"))
        np.testing.assert_array_equal(await decoder.decode(reference(data), data), expected)


async def test_broken_images_are_refused_and_leave_nothing_behind(decoder: Decoder) -> None:
    chance = random.Random(5)
    files = [FILES["PNG"], FILES["JPEG"], FILES["WEBP"], FILES["GIF"], FILES["palette"]]
    await decoder.decode(reference(files[0]), files[0])
    before, num_refused = len(os.listdir("/proc/self/fd")), 0
    for number in range(100):
        whole = files[number % len(files)]
        ref, data = reference(whole), bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(8, len(data))] = chance.randrange(256)
        try:
            pixels = await decoder.decode(ref, bytes(data[: chance.randrange(len(data) // 2, len(data) + 1)]))
            assert pixels.shape == (30, 40, 3)
            del pixels
        except BadRequestError as error:
            num_refused += error.param == "media" and str(error).startswith("The image ")
    assert num_refused > 20
    assert len(os.listdir("/proc/self/fd")) == before
    # A neighbour notices nothing.
    np.testing.assert_array_equal(await decoder.decode(reference(files[0]), files[0]), np.asarray(picture()))


@pytest.mark.parametrize(
    ("cpu_s", "is_late", "problem"),
    [(1.0, True, None), (LIMITS.cpu_s, True, f"more than {LIMITS.cpu_s:g} s"), (1.0, False, r"more than \d+ MB")],
)
async def test_slow_image_is_told_apart_from_one_that_takes_too_much(
    cpu_s: float, is_late: bool, problem: str | None
) -> None:
    link = Mock(ask=AsyncMock(return_value=Outcome(is_late=is_late)))
    data = FILES["PNG"]
    with pytest.raises(BadRequestError if problem else SlowImageError, match=problem):
        await Decoder(link).decode(reference(data), data, cpu_s)


async def test_decoder_that_finds_no_memory_says_nothing_of_the_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = FILES["PNG"]
    (tmp_path / "image").write_bytes(data)
    ref = reference(data)
    asked = DecodeWork(str(tmp_path / "image"), str(tmp_path / "pixels"), ref.mime, ref.width, ref.height, 1.0)
    for number, raised in ((errno.ENOMEM, MemoryError), (errno.EIO, ImageProblemError)):
        monkeypatch.setattr(Image, "open", Mock(side_effect=OSError(number, "no")))
        with pytest.raises(raised):
            _decode(asked)
