"""Files as Anthropic's libraries upload and list them: no purpose, other names, and pages by a cursor."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from starlette.requests import Request

from gateway.admission.stored_reads import ReadSize
from gateway.api.schemas.checks import check_query, invalid_value, whole_number
from gateway.files.catalog import FileCatalog
from gateway.files.objects import BYTES, FILE_ID, FileRecord

_LIST = frozenset({"beta", "limit", "page", "after_id", "before_id", "ids", "ids[]"})
_MAX_IDS = 100
_PAGE = "page_"


class AnthropicFile(Struct, forbid_unknown_fields=True):
    """A file."""

    id: str
    type: Literal["file"]
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str | None
    downloadable: bool


class AnthropicFileList(Struct, forbid_unknown_fields=True):
    """A page of files, newest first."""

    data: list[AnthropicFile]
    has_more: bool
    first_id: str | None
    last_id: str | None
    next_page: str | None


class AnthropicDeletedFile(Struct, forbid_unknown_fields=True):
    """A file that was deleted."""

    id: str
    type: Literal["file_deleted"]


def is_from_anthropic(request: Request) -> bool:
    """Whether one of Anthropic's libraries asks: each request of theirs names the version of the API."""
    return "anthropic-version" in request.headers


def anthropic_file(record: FileRecord) -> AnthropicFile:
    """Return a file as Anthropic's clients see it."""
    return AnthropicFile(
        id=record.id,
        type="file",
        filename=record.filename,
        mime_type=record.mime_type or BYTES,
        size_bytes=record.num_bytes,
        created_at=_moment(record.created_at),
        expires_at=None if record.expires_at is None else _moment(record.expires_at),
        downloadable=True,
    )


async def anthropic_page(
    request: Request, catalog: FileCatalog, tenant: str, size: ReadSize, *, allow_unknown: bool
) -> AnthropicFileList:
    """Return the page asked for: by `page`, the older `after_id` or `before_id`, or `ids`; `ApiError` 400 or 503."""
    check_query(request, _LIST, allow_unknown=allow_unknown)
    query = request.query_params
    ids = list(dict.fromkeys([*query.getlist("ids"), *query.getlist("ids[]")]))
    if ids:
        if len(ids) > _MAX_IDS or {"page", "limit"} & query.keys():
            raise invalid_value("ids", f"'ids' may name {_MAX_IDS} files, and stands without 'page' and 'limit'.")
        size.num_records += len(ids)
        records = await asyncio.gather(*(catalog.get(tenant, each) for each in ids))
        return _page([each for each in records if each is not None], has_more=False)
    limit = whole_number(query.get("limit"), "limit", 1, 1000, 20)
    name = next((each for each in ("page", "before_id", "after_id") if each in query), "page")
    cursor = query.get(name)
    place = cursor.removeprefix(_PAGE) if cursor is not None and name == "page" else cursor
    if place is not None and FILE_ID.fullmatch(place) is None:
        raise invalid_value(name, f"'{name}' must be as the page before told it.")
    is_before = name == "before_id"
    found, has_more = await catalog.page(tenant, limit, place, size, is_ascending=is_before, purpose=None)
    return _page(found[::-1] if is_before else found, has_more=has_more)


def _page(records: list[FileRecord], *, has_more: bool) -> AnthropicFileList:
    first, last = (records[0].id, records[-1].id) if records else (None, None)
    following = f"{_PAGE}{last}" if has_more else None
    return AnthropicFileList(list(map(anthropic_file, records)), has_more, first, last, following)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
