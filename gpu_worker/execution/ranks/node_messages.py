"""What rank 0 tells the other hosts of its group, and they it."""

from __future__ import annotations

import msgspec
from msgspec.msgpack import Decoder

from gpu_worker.execution.ranks.messages import Reply, decoder_of


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
    """What the ranks of a host show of their lives, as often as a rank ticks."""

    beats: list[Beat]


ToNode = StartRank | KillRank | TellRank | EndEpoch | BeginEpoch | Goodbye
FromNode = Started | Said | Ended | Pulse

TO_NODE: Decoder[ToNode] = decoder_of(ToNode)
FROM_NODE: Decoder[FromNode] = decoder_of(FromNode)
