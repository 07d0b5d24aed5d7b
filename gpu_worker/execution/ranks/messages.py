"""What rank 0 and the other ranks tell each other through pipes, and rank 0 and the other hosts of its group by links.

In a pipe each message stands behind its length in four bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from gpu_worker.core.draft import Draft
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.runner_config import RunnerConfig

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True):
    """The first message to a rank.

    Attributes:
        board_fd: Descriptor of the board of its host.
        is_shared: Ranks sum through the board.
        interface: Network interface to the ranks of other hosts; empty if there are none.
    """

    rank: int
    runner: RunnerConfig
    board_fd: int
    is_shared: bool
    interface: str
    log_level: str
    log_format: str


Places = list[tuple[int, ...]]
"""By layers whose experts move, the expert in each place of all ranks; empty where none move."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Load the model in place of a rank that is gone, with as many blocks as the others have, and say `Ready`."""

    epoch: int
    num_blocks: int
    places: Places


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Meet the other ranks, and warm up with them; who has no model yet builds it first.

    Attributes:
        store: What ranks meet by, where they do so by torch: a file, or on several hosts `tcp:address:port:prefix`.
        places: Where experts are; a rank that was lost may have missed a move.
    """

    store: str
    places: Places


class Order(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A step to compute, with the drafts that it verifies, one a share; None where there are none."""

    plan: StepPlan
    drafts: list[Draft] | None = None


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Forget all sequences, leave the group, and say `Ready`: a rank was lost."""

    epoch: int


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Why the group does not start."""

    problem: str


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """A matrix, row by row: bfloat16 or float32."""

    is_bfloat16: bool
    data: bytes


class AdapterPart(msgspec.Struct, frozen=True, array_like=True):
    """A `LowRankPart`; `features` are int64."""

    rank: int
    scale: float
    features: bytes
    down: Numbers
    up: Numbers


class AdapterPiece(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """What an adapter adds beside one matrix, of all its features; `PackAdapter` follows its last piece."""

    matrix: str
    parts: list[AdapterPart]


class PackAdapter(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Pack the adapter whose pieces came, beside steps, keep it under this number, and say `Done`."""

    number: int
    max_rank: int


class PlaceAdapter(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Place the adapter kept under a number in a slot that no step reads, and reply `Done`; None clears the slot.

    Without a slot, the kept adapter is forgotten.
    """

    number: int | None
    slot: int | None


class PrepareExperts(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Read what this rank lacks of a layer for experts to be in these places, beside steps, and say `Done`.

    Attributes:
        layer: Among those whose experts move.
    """

    number: int
    layer: int
    places: tuple[int, ...]


class MoveExperts(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Use the places of the `PrepareExperts` of this number from the next step on; all ranks get this message."""

    number: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The identity of a rank, on which all must agree, by the names that errors about differences use."""

    identity: dict[str, str]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank has a model, is in no collective, and waits for the meeting of this epoch."""

    epoch: int


class Stumbled(msgspec.Struct, frozen=True, tag=True):
    """Why a rank could not compute a step; it waits for the message to leave."""

    problem: str


class Landed(msgspec.Struct, frozen=True, tag=True):
    """What a step gave, of the rank that draws tokens where that is not rank 0."""

    result: StepResult


class Done(msgspec.Struct, frozen=True, tag=True):
    """What this number was given to is done, or there is a problem; an adapter is in no slot then."""

    number: int
    problem: str | None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a rank ends."""

    problem: str


Task = AdapterPiece | PackAdapter | PlaceAdapter | PrepareExperts | MoveExperts
"""What a rank does beside steps, or between two of them."""
Command = Load | Meet | Order | Leave | Refuse | Task
Reply = Hello | Ready | Stumbled | Landed | Done | Failure


class StartRank(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start the process of a rank; the host says `Started`."""

    rank: int


class KillRank(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """End the process of a rank at once."""

    rank: int


class TellRank(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Pass an encoded message on to a rank, or to all of the host."""

    rank: int | None
    message: bytes


class EndEpoch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The group is lost: ranks that wait for others are to stop."""


class BeginEpoch(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The ranks are about to meet anew."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Why the group does not start."""

    problem: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The process of a rank was started."""

    rank: int
    pid: int


class Said(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a rank has said."""

    rank: int
    pid: int
    reply: Reply


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Why the process of a rank has ended."""

    rank: int
    pid: int
    epitaph: str


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """What a rank shows of its life."""

    rank: int
    ticks: int
    step: int
    loads: int
    is_starved: bool


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What the ranks of a host show of their lives, as often as a rank ticks.

    Attributes:
        is_busy: The host itself got a core too late in the last second.
    """

    beats: list[Beat]
    is_busy: bool


ToNode = StartRank | KillRank | TellRank | EndEpoch | BeginEpoch | Goodbye
FromNode = Started | Said | Ended | Pulse


def _path(kind: type, value: object) -> object:
    assert kind is Path, f"messages hold no {kind}"
    return Path(str(value))


START: Decoder[Start] = Decoder(Start, dec_hook=_path)
COMMANDS: Decoder[Command] = Decoder(Command, dec_hook=_path)
REPLIES: Decoder[Reply] = Decoder(Reply, dec_hook=_path)
TO_NODE: Decoder[ToNode] = Decoder(ToNode)
FROM_NODE: Decoder[FromNode] = Decoder(FromNode)


def encode(value: object) -> bytes:
    """Return a message with its length before it."""
    data = msgspec.msgpack.encode(value, enc_hook=str)
    return struct.pack("<I", len(data)) + data


def receive(stream: IO[bytes], decoder: Decoder[T]) -> T | None:
    """Return the next message; None at the end of the stream."""
    length = stream.read(4)
    if len(length) < 4:
        return None
    count = struct.unpack("<I", length)[0]
    data = stream.read(count)
    if len(data) < count:
        return None
    return decoder.decode(data)
