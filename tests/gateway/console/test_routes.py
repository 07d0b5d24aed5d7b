"""Files of the console over HTTP."""

from __future__ import annotations

from starlette.requests import Request

from gateway.console.routes import ConsoleFiles, _not_found
from shared.subjects import BATCH_ID


def request(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path_params": {"name": "index.html"}, "headers": raw})


def test_browser_keeps_a_file_until_it_is_another() -> None:
    files = ConsoleFiles()
    first = files.response(request({}))
    assert files.response(request({"if-none-match": first.headers["etag"]})).status_code == 304
    changed = files.response(request({"if-none-match": '"of the version before"'}))
    assert (changed.status_code, changed.body) == (200, first.body)


def test_id_of_a_batch_is_told_apart_from_those_of_its_lines() -> None:
    batch = f"batch_{'01' * 16}"
    assert BATCH_ID.fullmatch(batch)
    assert f"is a batch: ask for one of its lines, {batch}-1," in _not_found(batch)
    assert "No gateway keeps a request" in _not_found(f"{batch}-1")
