"""What rank 0 tells the other ranks through a pipe, and they it: each message behind its length in four bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.runner_config import RunnerConfig

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True):
    """The first thing that a rank is told.

    Attributes:
        rank: Its number.
        runner: Settings of the model's runner.
        board_fd: Descriptor of the group's board.
        store: The file by which ranks meet, where they do so by torch.
        is_shared: They meet through the board.
        log_level, log_format: As those of rank 0.
    """

    rank: int
    runner: RunnerConfig
    board_fd: int
    store: str
    is_shared: bool
    log_level: str
    log_format: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a rank is, in which all must agree: by the names that differences are told by."""

    identity: dict[str, str]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a rank ends."""

    problem: str


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A step to compute, with the drafts that it verifies, one a share; None where there are none."""

    plan: StepPlan
    drafts: list[Draft] | None = None


def encode(value: object) -> bytes:
    """Return a message with its length before it."""
    data = msgspec.msgpack.encode(value, enc_hook=str)
    return struct.pack("<I", len(data)) + data


def receive(stream: IO[bytes], kind: type[T] | Any) -> T | None:
    """Return the next message; None at the end of the stream."""
    length = stream.read(4)
    if len(length) < 4:
        return None
    count = struct.unpack("<I", length)[0]
    data = stream.read(count)
    if len(data) < count:
        return None
    message: T = msgspec.msgpack.decode(data, type=kind, dec_hook=_path)
    return message


def _path(kind: type, value: object) -> object:
    assert kind is Path, f"messages hold no {kind}"
    return Path(str(value))
