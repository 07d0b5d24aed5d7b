"""Scans of JPEGs are counted as decoders find them."""

from __future__ import annotations

import pytest

from gpu_worker.media.decode_process import check_scans
from shared.image_header import ImageProblemError
from tests.images import encoded, picture, scans_added


@pytest.mark.parametrize("filler", [b"\xff\x02\xff\xff", b"\xff\xff\xff", b"\0\xff\0", b"\xff\xd0"])
def test_scans_cannot_be_hidden_from_the_count(filler: bytes) -> None:
    with pytest.raises(ImageProblemError, match="more than 64 scans"):
        check_scans(scans_added(encoded(picture(), "JPEG", progressive=True), 100, filler))
    with pytest.raises(ImageProblemError, match="more than 4096 markers"):
        check_scans(b"\xff\xd8" + b"\xff\x01" * 5000)


def test_jpeg_of_as_many_scans_as_are_allowed_is_read() -> None:
    jpeg = encoded(picture(), "JPEG", progressive=True)
    missing = 64 - jpeg.count(b"\xff\xda")
    check_scans(scans_added(jpeg, missing))
    with pytest.raises(ImageProblemError, match="more than 64 scans"):
        check_scans(scans_added(jpeg, missing + 1))
