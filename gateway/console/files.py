"""The files of the console, read once from the package: pages without anything to build or to fetch from elsewhere.

They hold no data, so they need no key. The policy lets them load nothing but themselves and ask this port alone; no
script stands in a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import ApiError

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ConsoleFiles:
    """Answers with files by their names."""

    def __init__(self) -> None:
        files = [path for path in _FOLDER.iterdir() if path.suffix in _TYPES]
        self._contents = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in files}

    def response(self, request: Request) -> Response:
        """Return the file that the path names, the page itself without a name.

        Raises:
            ApiError: 404; there is none.
        """
        name: str = request.path_params.get("name", "index.html")
        found = self._contents.get(name)
        if found is None:
            raise ApiError(404, f"The console has no file {name[:64]!r}.", code="unknown_url")
        content, media_type = found
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)
