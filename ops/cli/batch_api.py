"""A client of `/v1/files` and `/v1/batches`: uploads, watches, downloads from where the last download ended."""

from __future__ import annotations

import http.client
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ops.cli.running_system import Endpoint, ServerRefusedError
from shared.errors import ConfigError

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_PIECE_BYTES = 1 << 18
_NOTHING_NEW = 416


@dataclass(frozen=True, slots=True)
class BatchApi:
    """The batches of one key. All methods raise `ServerRefusedError` where the server is away or refuses."""

    endpoint: Endpoint

    def upload(self, file: Path, note: Callable[[int], None]) -> str:
        """Upload a file and return its id; `note` gets the number of bytes so far.

        Raises:
            ConfigError: It cannot be read.
        """
        boundary = secrets.token_hex(16)
        name = "".join(character if character not in '"\\\r\n' else "_" for character in file.name)
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
        head += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        tail = f"\r\n--{boundary}--\r\n".encode()
        try:
            with file.open("rb") as source:
                size = file.stat().st_size
                headers = {
                    "Content-Type": f"multipart/form-data; boundary={boundary}",
                    "Content-Length": str(len(head.encode()) + size + len(tail)),
                }
                body = _pieces(head.encode(), source, tail, note)
                found = json.loads(self.endpoint.open("POST", "/v1/files", body, headers).read())
        except OSError as error:
            raise ConfigError("FILE", f"{file} cannot be read: {error.strerror}") from error
        return str(found["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """Make a batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self.endpoint.call("POST", "/v1/batches", body)

    def get(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return self.endpoint.call("GET", f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Have a batch end."""
        return self.endpoint.call("POST", f"/v1/batches/{batch_id}/cancel", {})

    def download(self, file_id: str, start: int, target: BinaryIO) -> int:
        """Write what a file has from a byte on; return how many bytes that was."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self.endpoint.open("GET", f"/v1/files/{file_id}/content", None, headers)
        except ServerRefusedError as error:
            if error.status == _NOTHING_NEW:
                return 0
            raise
        num = 0
        try:
            while piece := response.read(_PIECE_BYTES):
                target.write(piece)
                num += len(piece)
        except (OSError, http.client.HTTPException) as error:
            raise ServerRefusedError(0, f"the download broke off after {start + num} bytes: {error!r}") from error
        finally:
            response.close()
        return num


def endpoint_of(file: Path) -> str:
    """Return the endpoint that the first line of a file is for.

    Raises:
        ConfigError: There is no such line.
    """
    try:
        with file.open(encoding="utf-8-sig") as lines:
            first = next((line for line in lines if line.strip()), "")
        url = json.loads(first)["url"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{file} does not begin with a line of OpenAI's Batch API, which names its url ({error!r})"
        raise ConfigError("FILE", problem) from error
    return str(url)


def _pieces(head: bytes, source: BinaryIO, tail: bytes, note: Callable[[int], None]) -> Iterator[bytes]:
    yield head
    num = 0
    while piece := source.read(_PIECE_BYTES):
        yield piece
        num += len(piece)
        note(num)
    yield tail
