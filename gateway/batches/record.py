"""A batch: the record that all gateways share, and its form in OpenAI's API.

One record in NATS has everything but the bytes: status, counts, the lines that are done, and where their output is. It
is replaced only by compare-and-set, so its lines and output are always consistent. `epoch` counts the batch's
drivers: files that a driver writes to the store carry its epoch, and are valid once the record names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from gateway.api.operation import Operation
from gateway.responses.draft import ResponseUsage
from shared.messages import Usage

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
Kind = Literal["output", "error"]
KINDS: tuple[Kind, ...] = ("output", "error")
ENDED: frozenset[BatchStatus] = frozenset({"completed", "failed", "expired", "cancelled"})
_TIMES: dict[BatchStatus, str] = {status: f"{status}_at" for status in get_args(BatchStatus) if status != "validating"}
OUTPUT_ID = re.compile(r"file-([0-9a-f]{32})-(output|error)")


class BatchError(Struct, frozen=True, omit_defaults=False):
    """Why a batch cannot be computed; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


# A record is a message of NATS: lines of a tenant's file may not make it large.
MAX_ERROR_BYTES = 400
MAX_ERRORS_BYTES = 16 << 10


def bounded_errors(errors: Iterable[BatchError]) -> list[BatchError]:
    """Return the first errors, with their texts cut, within `MAX_ERRORS_BYTES` of JSON."""
    kept: list[BatchError] = []
    num_left = MAX_ERRORS_BYTES
    for error in errors:
        param = None if error.param is None else _cut(error.param)
        kept.append(msgspec.structs.replace(error, message=_cut(error.message), param=param))
        num_left -= len(msgspec.json.encode(kept[-1]))
        if num_left < 0:
            return kept[:-1]
    return kept


def _cut(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_ERROR_BYTES:
        return encoded.decode()
    return encoded[:MAX_ERROR_BYTES].decode(errors="ignore") + "..."


class Part(Struct, frozen=True, array_like=True):
    """A piece of output in the store, `<epoch>-<number>`: its bytes of answers, and its bytes of errors."""

    epoch: int
    number: int
    output_bytes: int
    error_bytes: int


class BatchRecord(Struct, kw_only=True, omit_defaults=True):
    """A batch.

    Attributes:
        models: Those that the key may use; None for all.
        max_priority: Of its jobs; None for that of any job.
        key, weight: Of the API key that made it.
        ends_as: The status that follows `finalizing`, or `cancelling`.
        times: Unix seconds at which each status began.
        store: Identity of the store with its files: gateways that have another one leave it alone.
        total, completed, failed: Lines.
        usage, reasoning_tokens: Of the answers so far.
        owner: The gateway that drives it; empty if none does.
        epoch: Its number among the drivers.
        saves: How often the record was written by a driver, by which it knows its own writes.
        num_sent: Jobs of the lines up to this number may be in the queue.
        done: A bit for each line whose output is in `parts`, the first line's the lowest of the first byte.
        position: The number of the first line that may not be done, and where it begins in the file.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    models: list[str] | None = None
    max_priority: int | None = None
    key: str = ""
    weight: float = 1.0
    status: BatchStatus = "validating"
    ends_as: BatchStatus = "completed"
    times: dict[str, int] = {}
    errors: list[BatchError] = []
    store: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage(0, 0)
    reasoning_tokens: int = 0
    owner: str = ""
    epoch: int = 0
    saves: int = 0
    num_sent: int = 0
    done: bytes = b""
    position: tuple[int, int] = (1, 0)
    parts: list[Part] = []

    def enter(self, status: BatchStatus, now: float) -> None:
        """Begin a status."""
        self.status = status
        self.times = {**self.times, _TIMES[status]: int(now)}

    def is_done(self, line: int) -> bool:
        """Whether the output of a line is stored."""
        place, bit = divmod(line - 1, 8)
        return place < len(self.done) and bool(self.done[place] >> bit & 1)

    @property
    def suffix(self) -> str:
        """What its id, and those of its files, have in common."""
        return self.id.removeprefix("batch_")

    def file_id(self, kind: Kind) -> str:
        """Return the id of its file of answers, or of errors."""
        return f"file-{self.suffix}-{kind}"

    def num_bytes(self, kind: Kind) -> int:
        """Return the bytes of its answers, or of its errors."""
        return sum(part.output_bytes if kind == "output" else part.error_bytes for part in self.parts)


def with_done(done: bytes, lines: list[int]) -> bytes:
    """Return the bits with those of `lines` set too."""
    bits = bytearray(done)
    if lines:
        bits.extend(bytes(max(0, (max(lines) + 7) // 8 - len(bits))))
    for line in lines:
        place, bit = divmod(line - 1, 8)
        bits[place] |= 1 << bit
    return bytes(bits)


class OutputExpiry(Struct, frozen=True, forbid_unknown_fields=True):
    """Lifetime of a batch's files, from their creation."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compute."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None
    output_expires_after: OutputExpiry | None = None


class RequestCounts(Struct, forbid_unknown_fields=True):
    """Lines of a batch, by how they ended."""

    total: int
    completed: int
    failed: int


class BatchErrors(Struct, forbid_unknown_fields=True):
    """The lines that cannot be computed."""

    object: Literal["list"]
    data: list[BatchError]


class BatchAnswer(Struct, forbid_unknown_fields=True):
    """A batch. The partial files can be read while it runs; the others are there once it has ended."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: ResponseUsage
    partial_output_file_id: str | None
    partial_error_file_id: str | None


class BatchList(Struct, forbid_unknown_fields=True):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


OPERATIONS = (
    Operation("post", "/v1/batches", "Compute the requests of a file.", BatchAnswer, BatchBody),
    Operation("get", "/v1/batches", "List batches.", BatchList),
    Operation("get", "/v1/batches/{batch_id}", "Show a batch.", BatchAnswer),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Stop a batch.", BatchAnswer),
)


def batch_answer(record: BatchRecord) -> BatchAnswer:
    """Return a batch as clients see it."""
    files: dict[str, Any] = {name: record.times.get(name) for name in _TIMES.values()}
    has_ended = record.status in ENDED
    for kind in KINDS:
        file_id = record.file_id(kind) if record.num_bytes(kind) else None
        files |= {f"{kind}_file_id": file_id if has_ended else None}
        files |= {f"partial_{kind}_file_id": None if has_ended else file_id}
    used = record.usage
    reasoning = record.reasoning_tokens
    return BatchAnswer(
        id=record.id,
        object="batch",
        endpoint=record.endpoint,
        errors=BatchErrors("list", record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=RequestCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        usage=ResponseUsage.of(used.prompt_tokens, used.completion_tokens, used.cached_tokens, reasoning),
        **files,
    )


decode_batch = msgspec.msgpack.Decoder(BatchRecord).decode
