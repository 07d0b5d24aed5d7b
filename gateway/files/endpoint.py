"""The routes of files: upload, list, show, download, delete. Each needs a key, and finds its tenant's files alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.admission.auth import Principal
from gateway.api.door import exchange_of
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.checks import check_query, invalid_value, is_ascending, whole_number
from gateway.errors import ApiError
from gateway.files.anthropic_form import AnthropicDeletedFile, anthropic_file, anthropic_page, is_from_anthropic
from gateway.files.catalog import READ_BYTES, FileCatalog, ReadableFile
from gateway.files.form_data import FormData
from gateway.files.objects import BYTES, FILE_ID, DeletedFile, FileList, FileRecord, file_answer, ordered_hex
from gateway.files.upload import UploadForm
from shared.objects.store import MissingObjectError, StoreError
from shared.tenant_bounds import counted

_PATH = "/v1/files"
_MAX_FILES = 10_000
# A slow reader holds some megabytes.
MAX_DOWNLOADS = 32
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
_UNQUOTABLE = re.compile(r'[^ -~]|["\\]')
# Of the form around the file.
_FORM_BYTES = 64 << 10
_LIST = frozenset({"after", "limit", "order", "purpose"})


class _Download(StreamingResponse):
    """Pieces of a file. It is counted while it runs; what it holds of the file goes when the client leaves."""

    def __init__(
        self, pieces: AsyncGenerator[bytes], running: Counter[str], tenant: str, status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(pieces, status, headers, BYTES)
        self._pieces, self._running, self._tenant = pieces, running, tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with counted(self._running, self._tenant):
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._pieces.aclose()


class FileRoutes:
    """Handles the routes. Of requests it keeps how many downloads of each tenant run."""

    def __init__(self, services: RouteServices, catalog: FileCatalog) -> None:
        self._services = services
        self._catalog = catalog
        self._downloads: Counter[str] = Counter()

    def routes(self) -> list[KeyRoute]:
        """Return the routes."""
        return [
            KeyRoute("POST", _PATH, self._upload),
            KeyRoute("GET", _PATH, self._list),
            KeyRoute("GET", f"{_PATH}/{{file_id}}", self._show),
            KeyRoute("DELETE", f"{_PATH}/{{file_id}}", self._delete),
            KeyRoute("GET", f"{_PATH}/{{file_id}}/content", self._download),
        ]

    async def _upload(self, request: Request, principal: Principal) -> Response:
        config, exchange = self._services.config, exchange_of(request.scope)
        form = FormData(request.headers.get("content-type", ""))
        upload = UploadForm(form, config.allow_unknown_parameters, is_from_anthropic(request))
        most = config.max_file_bytes
        length = exchange.head.content_length
        if length is not None and length > most + _FORM_BYTES:
            raise _too_large(most)
        lease = await self._services.limiter.admit(principal, 1, 0)
        try:
            body = exchange.stream_body(most + _FORM_BYTES, principal.body_owner)
            async with self._catalog.room(principal.tenant, most if length is None else min(length, most)):
                with self._catalog.answering():
                    file_id = f"file-{ordered_hex()}"
                    pieces = _bounded(upload, body, most)
                    _, digest = await self._catalog.write(principal.tenant, file_id, pieces)
                    await self._catalog.check_stored(principal.tenant, file_id)
                    record = upload.record(principal.tenant, file_id, digest, int(self._catalog.now()))
                    await self._catalog.publish(record)
        finally:
            lease.release()
        self._services.metrics.file_bytes_uploaded += record.num_bytes
        return _told(request, record)

    async def _list(self, request: Request, principal: Principal) -> Response:
        query = request.query_params
        if is_from_anthropic(request):
            allow_unknown = self._services.config.allow_unknown_parameters
            async with self._services.reads.turn(principal, "files") as size:
                page = await anthropic_page(request, self._catalog, principal.tenant, size, allow_unknown=allow_unknown)
            return json_response(page)
        check_query(request, _LIST, allow_unknown=self._services.config.allow_unknown_parameters)
        limit = whole_number(query.get("limit"), "limit", 1, _MAX_FILES, _MAX_FILES)
        after, tenant = checked_after(query.get("after"), FILE_ID), principal.tenant
        purpose, rises = query.get("purpose"), is_ascending(request)
        async with self._services.reads.turn(principal, "files") as size:
            found, has_more = await self._catalog.page(tenant, limit, after, size, is_ascending=rises, purpose=purpose)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(FileList("list", list(map(file_answer, found)), first, last, has_more))

    async def _show(self, request: Request, principal: Principal) -> Response:
        return _told(request, (await self._found(request, principal)).record)

    async def _delete(self, request: Request, principal: Principal) -> Response:
        hooks = self._catalog.hooks
        async with self._services.reads.turn(principal, "files") as size:
            file_id = (await self._find(request, principal)).record.id
            batch_id = None if hooks is None else await hooks.user_of(principal.tenant, file_id, size)
        if batch_id is not None:
            message = f"File '{file_id}' belongs to batch '{batch_id}', which runs. Cancel the batch, or wait."
            raise ApiError(400, message, param="file_id", code="file_in_use")
        await self._catalog.delete(principal.tenant, file_id)
        if is_from_anthropic(request):
            return json_response(AnthropicDeletedFile(file_id, "file_deleted"))
        return json_response(DeletedFile(file_id, "file", True))

    async def _download(self, request: Request, principal: Principal) -> Response:
        found = await self._found(request, principal)
        size = found.record.num_bytes
        asked = None if request.method == "HEAD" else _asked_range(request.headers.get("range", ""), size)
        start, end = asked or (0, size)
        if asked and start >= end:
            message = f"File '{found.record.id}' has {size} bytes."
            raise ApiError(416, message, code="invalid_range", headers={"Content-Range": f"bytes */{size}"})
        headers = {
            "content-disposition": f'attachment; filename="{_UNQUOTABLE.sub("_", found.record.filename)}"',
            "accept-ranges": "bytes",
            "content-length": str(end - start),
            **({"content-range": f"bytes {start}-{end - 1}/{size}"} if asked else {}),
        }
        if request.method == "HEAD" or not size:
            return Response(b"", 200, headers, BYTES)
        if self._downloads[principal.tenant] >= MAX_DOWNLOADS:
            message = f"{MAX_DOWNLOADS} downloads of this tenant run already. Wait until one has ended."
            raise ApiError(429, message, code="too_many_streams", retry_after_s=5.0)
        with self._catalog.answering():
            try:
                first = await found.read(start, min(READ_BYTES, end - start))
            except MissingObjectError:
                raise _not_found(found.record.id) from None
        pieces = self._pieces(found, first, start, end)
        return _Download(pieces, self._downloads, principal.tenant, 206 if asked else 200, headers)

    async def _pieces(self, found: ReadableFile, first: bytes, start: int, end: int) -> AsyncGenerator[bytes]:
        """Yield bytes of a file; where they cannot be read, the connection is cut, so that the client knows."""
        piece = first
        while piece:
            yield piece
            start += len(piece)
            self._services.metrics.file_bytes_downloaded += len(piece)
            try:
                piece = await found.read(start, min(READ_BYTES, end - start)) if start < end else b""
            except StoreError as error:
                self._catalog.note_failure(error)
                raise

    async def _found(self, request: Request, principal: Principal) -> ReadableFile:
        async with self._services.reads.turn(principal, "files"):
            return await self._find(request, principal)

    async def _find(self, request: Request, principal: Principal) -> ReadableFile:
        """Find the file of a request, in a turn of its tenant."""
        file_id: str = request.path_params["file_id"]
        catalog, tenant = self._catalog, principal.tenant
        record = await catalog.get(tenant, file_id)
        if record is not None:
            return ReadableFile(record, partial(catalog.read, record))
        growing = None if catalog.hooks is None else await catalog.hooks.growing(tenant, file_id)
        if growing is None:
            raise _not_found(file_id)
        return growing


def _told(request: Request, record: FileRecord) -> Response:
    return json_response((anthropic_file if is_from_anthropic(request) else file_answer)(record))


def checked_after(text: str | None, form: re.Pattern[str]) -> str | None:
    """Return the id behind which a page begins; `ApiError` 400 if it is not of this form."""
    if text is not None and form.fullmatch(text) is None:
        raise invalid_value("after", "'after' must be the id of the last object of the page before, as it was listed.")
    return text


def _asked_range(header: str, size: int) -> tuple[int, int] | None:
    """Return begin and end of the bytes that a Range header asks for; None for all of them, also where it is wrong."""
    found = _RANGE.fullmatch(header)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return max(0, size - int(found[2])), size
    start, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    return None if found[2] and int(found[2]) < start else (start, end)


async def _bounded(upload: UploadForm, body: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    async for piece in upload.pieces(body):
        if upload.num_bytes > most:
            raise _too_large(most)
        yield piece


def _too_large(most: int) -> ApiError:
    message = f"The file is larger than {most} bytes. Split it into several batches."
    return ApiError(413, message, param="file", code="file_too_large")


def _not_found(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id[:128]}", param="id", code="file_not_found")
