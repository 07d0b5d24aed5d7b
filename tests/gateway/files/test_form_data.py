"""Form data in pieces of any size, made by a client's own encoder."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.files.form_data import FieldStart, FormData


def read(content_type: str, pieces: list[bytes]) -> tuple[list[tuple[str, str | None, bytes]], bool]:
    form, fields = FormData(content_type), list[tuple[str, str | None, bytes]]()
    for piece in pieces:
        for event in form.feed(piece):
            if isinstance(event, FieldStart):
                fields.append((event.name, event.filename, b""))
            else:
                name, filename, data = fields[-1]
                fields[-1] = (name, filename, data + event)
    return fields, form.is_complete


def disposition(parameters: str) -> bytes:
    return f"--b\r\nContent-Disposition: form-data; {parameters}\r\n\r\nhello\r\n--b--".encode()


def encoded(files: Any, data: dict[str, str]) -> tuple[str, bytes]:
    request = httpx2.Request("POST", "http://x/", files=files, data=data)
    return request.headers["content-type"], request.read()


@given(content=st.binary(max_size=300), size=st.integers(1, 80), name=st.sampled_from(["a.jsonl", "ä b.txt", 'x"y']))
def test_fields_are_read_whatever_the_pieces(content: bytes, size: int, name: str) -> None:
    content_type, body = encoded({"file": (name, content)}, {"purpose": "batch"})
    fields, is_complete = read(content_type, [body[i : i + size] for i in range(0, len(body), size)])
    assert is_complete
    assert fields[0] == ("purpose", None, b"batch")
    assert (fields[1][0], fields[1][2]) == ("file", content)
    assert (fields[1][1] or "").replace("%22", '"') == name


def test_body_that_is_cut_off_is_not_complete_wherever_it_is_cut() -> None:
    content_type, body = encoded({"file": ("a", b"0123456789")}, {"purpose": "batch"})
    end = body.rindex(b"--")
    assert not any(read(content_type, [body[:size]])[1] for size in range(end))
    assert read(content_type, [body])[1]


@pytest.mark.parametrize(
    ("parameters", "filename"),
    [
        ('name="file"; filename="a;b.txt"', "a;b.txt"),
        ("Name=file ; FILENAME = a.txt ;", "a.txt"),
        (r'name=file; filename="\"a\\b\c"', r'"a\b\c'),
        ("name=file;\r\n filename=a.txt", "a.txt"),
        ("name=file; filename=a; filename*=UTF-8'de'%c3%a4", "ä"),
        ("name=file; filename*=iso-8859-1''%e4", "ä"),
        ("name=file", None),
    ],
)
def test_parameters_of_a_field_are_read(parameters: str, filename: str | None) -> None:
    fields, _ = read('Multipart/Form-Data; charset=utf-8; boundary="b"', [disposition(parameters)])
    assert fields == [("file", filename, b"hello")]


def test_hostile_heads_take_time_in_proportion_to_their_length() -> None:
    before = time.thread_time()
    for parameters in ('x="' + ";" * 16_000, "x" * 16_000, "x=" + " " * 16_000 + '"', ";" * 16_000 + "="):
        with pytest.raises(ApiError, match="multipart/form-data"):
            FormData("multipart/form-data; " + parameters)
        with pytest.raises(ApiError):
            read("multipart/form-data; boundary=b", [disposition(parameters[:8000])])
    assert time.thread_time() - before < 0.1


@pytest.mark.parametrize(
    ("content_type", "body", "problem"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "multipart/form-data"),
        ('multipart/form-data; boundary="b', b"", "multipart/form-data"),
        ("multipart/form-data; boundary=" + "b" * 300, b"", "multipart/form-data"),
        ("multipart/form-data; boundary=b", b"x" * 9000, "no boundary"),
        ("multipart/form-data; boundary=b", b"--b\r\nx: " + b"y" * 9000, "head of a field"),
        ("multipart/form-data; boundary=b", disposition('name=file; x="' + ";" * 64_000), "head of a field is longer"),
        ("multipart/form-data; boundary=b", disposition('name="file'), "Content-Disposition"),
        ("multipart/form-data; boundary=b", disposition("name=file; filename*=undefined''x"), r"filename\*"),
        ("multipart/form-data; boundary=b", disposition("name=file; filename*=idna''x"), r"filename\*"),
        ("multipart/form-data; boundary=b", disposition("name=file; filename*=a\0b''x"), r"filename\*"),
        ("multipart/form-data; boundary=b", disposition("name=file; filename*=utf-8''%ff"), r"filename\*"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nhello\r\n--b--", "no name"),
        ("multipart/form-data; boundary=b", b"--bx\r\n\r\nhello\r\n--b--", "does not end its line"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n\r\n' * 40 + b"--b--",
            "more than 32",
        ),
    ],
)
def test_broken_form_is_refused_with_its_reason(content_type: str, body: bytes, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as caught:
        read(content_type, [body])
    assert caught.value.status == 400
