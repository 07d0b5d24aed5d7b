"""Error answers: four keys always, and headers that clients act on."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gateway.errors import ApiError, model_not_found

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "invalid_request_error"),
        (418, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "requests"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_body_has_the_four_keys_and_the_statuss_type(status: int, kind: str) -> None:
    error = msgspec.json.decode(ApiError(status, "why").body())["error"]
    assert error == {"message": "why", "type": kind, "param": None, "code": None}


@pytest.mark.parametrize(("seconds", "header"), [(0.01, b"1"), (1.2, b"2"), (60, b"60"), (3600, b"60")])
def test_retry_after_is_rounded_up_and_capped(seconds: float, header: bytes) -> None:
    assert dict(ApiError(503, "x", retry_after_s=seconds).response_headers())[b"retry-after"] == header


def test_long_model_name_is_cut_in_the_message() -> None:
    error = model_not_found("m" * 10_000)
    assert (error.status, error.param) == (404, "model")
    assert len(error.message) < 300


def test_documentation_has_exactly_the_codes_that_there_are() -> None:
    files = [path for room in ("gateway", "shared") for path in (ROOT / room).rglob("*.py")]
    source = "".join(path.read_text() for path in files)
    rows = [line for line in (ROOT / "ops/docs/errors.md").read_text().splitlines() if line.startswith(("| 4", "| 5"))]
    documented = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row.split("|")[3])}
    assert set(re.findall(r'code="(\w+)"', source)) - documented == set()
    assert {code for code in documented if f'"{code}"' not in source} == set()
