"""Files of the console over HTTP."""

from __future__ import annotations

from starlette.requests import Request

from gateway.console.routes import ConsoleFiles


def request(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path_params": {"name": "index.html"}, "headers": raw})


def test_browser_keeps_a_file_until_it_is_another() -> None:
    files = ConsoleFiles()
    first = files.response(request({}))
    assert files.response(request({"if-none-match": first.headers["etag"]})).status_code == 304
    changed = files.response(request({"if-none-match": '"of the version before"'}))
    assert (changed.status_code, changed.body) == (200, first.body)
