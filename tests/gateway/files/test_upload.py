"""Forms of uploads piece by piece: what is taken from their fields, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.errors import ApiError
from gateway.files.form_data import FormData
from gateway.files.upload import UploadForm, checked_expiry

FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'


def text_field(name: str, value: bytes) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"


async def read(body: bytes, size: int = 1000) -> tuple[UploadForm, bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), size):
            yield body[begin : begin + size]

    upload = UploadForm(FormData("multipart/form-data; boundary=b"))
    return upload, b"".join([piece async for piece in upload.pieces(pieces())])


async def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await read(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_fields_before_and_after_the_file_are_kept_and_the_file_is_none_of_them(size: int) -> None:
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    purpose, *expiry = (text_field(name, value.encode()) for name, value in fields.items())
    upload, content = await read(b"".join([purpose, FILE, *expiry, b"--b--\r\n"]), size)
    assert (content, upload.texts, upload.filename, upload.mime_type) == (b"x", fields, "a", None)
    record = upload.record("acme", "file-1", "digest", 1000)
    assert (record.purpose, record.num_bytes, record.created_at, record.expires_at) == ("batch", 1, 1000, 8200)
    assert (record.filename, record.mime_type) == ("a", None)


async def test_upload_that_was_cut_off_is_refused_as_that_wherever_it_was_cut() -> None:
    body = text_field("purpose", b"batch") + FILE
    for size in range(1, len(body)):
        assert (await refused(body[:size])).code == "truncated_upload"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (text_field("purpose", b"batch"), "file", "missing_required_parameter"),
        (FILE, "purpose", "missing_required_parameter"),
        (text_field("purpose", b"\xff") + FILE, "purpose", "invalid_value"),
        (text_field("purpose", b"batch") + text_field("expires_after[anchor]", b"created_at") + FILE,
         "expires_after[seconds]", "invalid_value"),
        (FILE * 2, "file", "invalid_value"),
        (text_field("purpose", b"batch") * 2 + FILE, "purpose", "invalid_value"),
    ],
)  # fmt: skip
async def test_complete_form_that_lacks_or_repeats_something_is_refused_for_that(
    body: bytes, param: str, code: str
) -> None:
    error = await refused(body + b"--b--\r\n")
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize("seconds", ["3600", "2592000"])
def test_expiry_within_its_bounds_is_taken(seconds: str) -> None:
    assert checked_expiry("x", seconds) == int(seconds)


@pytest.mark.parametrize(
    "seconds", ["", "hour", "-7200", "+7200", "7_200", "7200.0", " 7200", "٧٢٠٠", "3599", "2592001"]
)
def test_expiry_that_is_no_number_within_its_bounds_is_refused(seconds: str) -> None:
    with pytest.raises(ApiError, match="'x' must be a whole number from 3600 to 2592000") as caught:
        checked_expiry("x", seconds)
    assert (caught.value.status, caught.value.param) == (400, "x")
