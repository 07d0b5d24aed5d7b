"""The lines of an input file, read in ranges: memory holds one range, and one line that is not yet complete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from gateway.api.schemas.decoding import without_lone_surrogates
from shared.errors import BadRequestError

CHUNK_BYTES = 1 << 20
# Splitting this many lines blocks the event loop for one or two milliseconds, even in a chunk of a million lines.
_GROUP_LINES = 1000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Read = Callable[[int, int], Awaitable[bytes]]


class InputLine(NamedTuple):
    """A line that is not blank: its number from 1, where it begins and ends in the file, and its bytes.

    `data` is None for one that is too long.
    """

    number: int
    start: int
    end: int
    data: bytes | None


async def input_lines(
    read: Read, max_line_bytes: int, position: tuple[int, int] = (1, 0), on_chunk: Callable[[bytes], None] | None = None
) -> AsyncGenerator[list[InputLine], None]:
    """Yield the lines of a file from a position on, in groups.

    Args:
        read: Returns bytes from a place on, none behind the end.
        max_line_bytes: A longer line is not kept.
        position: Number and place of the first line.
        on_chunk: Gets all that is read.
    """
    number, start = position
    place, held = start, bytearray()
    # Bytes already dropped of a line that is too long.
    num_dropped = 0
    while True:
        chunk = await read(place, CHUNK_BYTES)
        place += len(chunk)
        if on_chunk is not None and chunk:
            on_chunk(chunk)
        held += chunk
        is_more = True
        while is_more:
            *whole, rest = held.split(b"\n", _GROUP_LINES) if chunk else [held, bytearray()]
            group: list[InputLine] = []
            for raw in whole:
                size = num_dropped + len(raw)
                data = bytes(raw) if size <= max_line_bytes and not num_dropped else None
                if data is not None:
                    data = line_data(data, start)
                if data is None or data:
                    group.append(InputLine(number, start, start + size, data))
                start += size + 1
                number, num_dropped = number + 1, 0
            held, is_more = rest, len(whole) == _GROUP_LINES
            if group:
                yield group
            await asyncio.sleep(0)
        if len(held) > max_line_bytes:
            num_dropped, held = num_dropped + len(held), bytearray()
        if not chunk:
            return


def line_data(data: bytes, start: int) -> bytes:
    """Return what counts of the bytes of a line that begins at `start` of its file."""
    return (data.removeprefix(_BYTE_ORDER_MARK) if start == 0 else data).strip()


def line_fields(line: InputLine, max_line_bytes: int) -> dict[str, Any]:
    """Return the JSON object of a line; raise `BadRequestError` if the line is not one."""
    if line.data is None:
        raise BadRequestError(f"The line is longer than {max_line_bytes} bytes.", None, "line_too_long")
    try:
        fields = json.loads(without_lone_surrogates(line.data).decode())
    except UnicodeDecodeError as error:
        raise BadRequestError(f"The line is not valid UTF-8: {error.reason}.", None, "invalid_json_line") from None
    except (ValueError, RecursionError) as error:
        message = f"This line is not parseable as valid JSON: {str(error)[:200]}."
        raise BadRequestError(message, None, "invalid_json_line") from None
    if not isinstance(fields, dict):
        raise BadRequestError("This line is not a JSON object.", None, "invalid_json_line")
    return fields
