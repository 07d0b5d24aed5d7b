"""A client of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import codecs
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
_BEHIND_THE_END = 416
_COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")


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

    def delete_file(self, file_id: str) -> None:
        """Delete a file; one that a running batch reads stays."""
        self.endpoint.call("DELETE", f"/v1/files/{file_id}")

    def batches(self, limit: int, after: str | None = None) -> dict[str, Any]:
        """Return a page of batches, the newest first."""
        return self.endpoint.call("GET", f"/v1/batches?limit={limit}{f'&after={after}' if after else ''}")

    def download(self, file_id: str, start: int, target: BinaryIO) -> int:
        """Write a file's bytes from an offset on, possibly none yet; return the end offset."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self.endpoint.open("GET", f"/v1/files/{file_id}/content", None, headers)
        except ServerRefusedError as error:
            if error.status == _BEHIND_THE_END:
                return start
            raise
        with response:
            while piece := _read(response, start):
                target.write(piece)
                start += len(piece)
        return start


def _read(response: http.client.HTTPResponse, done: int) -> bytes:
    try:
        return response.read(_PIECE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ServerRefusedError(0, f"the download broke off after {done} bytes: {error!r}") from error


def endpoint_of(file: Path) -> str:
    """Return the endpoint that the first line of a file is for; `ConfigError` if there is no such line."""
    try:
        with file.open("rb") as lines:
            first = next((line for line in lines if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    except FileNotFoundError:
        raise ConfigError("FILE", f"there is no file {file}") from None
    except OSError as error:
        raise ConfigError("FILE", f"{file} cannot be read: {error.strerror}") from error
    return _endpoint_of(first.removeprefix(codecs.BOM_UTF8), file)


def _endpoint_of(first: bytes, file: Path) -> str:
    if not first:
        raise ConfigError("FILE", f"{file} is empty")
    if first.startswith(_COMPRESSED):
        raise ConfigError("FILE", f"{file} is compressed; unpack it first")
    wanted = "a line of OpenAI's Batch API, an object with custom_id, method, url and body"
    try:
        line = json.loads(first.decode())
    except UnicodeDecodeError:
        raise ConfigError("FILE", f"{file} is not text in UTF-8") from None
    except (ValueError, RecursionError):
        raise ConfigError("FILE", f"{file} does not begin with JSON, but should with {wanted}") from None
    if isinstance(line, dict) and isinstance(line.get("url"), str):
        return str(line["url"])
    kind = "a JSON array: write one object a line" if isinstance(line, list) else "a line without a url"
    raise ConfigError("FILE", f"{file} begins with {kind}; wanted is {wanted}")


def _pieces(head: bytes, source: BinaryIO, tail: bytes, note: Callable[[int], None]) -> Iterator[bytes]:
    yield head
    num = 0
    while piece := source.read(_PIECE_BYTES):
        yield piece
        num += len(piece)
        note(num)
    yield tail
