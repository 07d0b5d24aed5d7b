"""A block's content as a file: a header that says exactly what it is, then the bytes.

Nothing is read from a file whose header is not, field for field, that of the content that is wanted. The weights are
named by a digest of all their bytes, since a model that was trained on has the name of the one before. The layout names
how bytes are laid out, and what computed them. The chain digest stands for the tokens, and whatever else the content
depends on, from the first one on.

Little endian: magic, version, group, weights, layout, salt, chain digest, number of bytes, their CRC-32, the CRC-32 of
all this. CRC-32 is zlib's, which finds every burst of up to 32 wrong bits; CRC-32C would find as many, and take a
package more.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

_MAGIC = b"HRKVBLK\n"
_VERSION = 1
_FIELDS = Struct("<8sHH32s32s32s32sQI")
_CHECKSUM = Struct("<I")

HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

KEY = re.compile(r"([0-9a-f]{32})/([0-9]{1,3})/[0-9a-f]{2}/([0-9a-f]{64})\.kv")
"""Of a file: who can use it, group, and chain digest."""
_SUMMED_BYTES = 4096
"""Of more than 5 KiB zlib lets other threads run, such as an engine that computes: a small payload would wait for its
next turn much longer than the sum takes."""
_SMALL_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Maker:
    """What computes contents: those of another are of no use.

    Attributes:
        weights: SHA-256 of the weights.
        layouts: By group, SHA-256 of the layout.
    """

    weights: bytes
    layouts: tuple[bytes, ...]

    @property
    def folder(self) -> str:
        """The name of the folder of its files."""
        return sha256(self.weights + b"".join(self.layouts)).hexdigest()[:32]

    def key(self, group: int, digest: bytes) -> str:
        """Return the name of a content's file."""
        name = digest.hex()
        return f"{self.folder}/{group}/{name[:2]}/{name}.kv"

    def header(self, group: int, digest: bytes, salt: bytes, payload: memoryview) -> bytes:
        """Return what stands before a content."""
        salted, size = sha256(b"salt" + salt).digest(), len(payload)
        of_content = (self.weights, self.layouts[group], salted, digest, size, _crc32(payload))
        fields = _FIELDS.pack(_MAGIC, _VERSION, group, *of_content)
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    def payload(
        self, data: bytes | bytearray, group: int, digest: bytes, salt: bytes, num_bytes: int
    ) -> memoryview | None:
        """Return the content in a file, None where it is not the one of this name, or is not whole."""
        if len(data) != HEADER_BYTES + num_bytes:
            return None
        payload = memoryview(data)[HEADER_BYTES:]
        return payload if data.startswith(self.header(group, digest, salt, payload)) else None


def _crc32(payload: memoryview) -> int:
    if len(payload) > _SMALL_BYTES:
        return zlib.crc32(payload)
    checksum = 0
    for begin in range(0, len(payload), _SUMMED_BYTES):
        checksum = zlib.crc32(payload[begin : begin + _SUMMED_BYTES], checksum)
    return checksum


class FileFacts(NamedTuple):
    """What a header says, for people."""

    group: int
    weights: str
    num_bytes: int


def read_facts(header: bytes) -> FileFacts | None:
    """Return what a header says; None where it is none."""
    if len(header) < HEADER_BYTES:
        return None
    fields = header[: _FIELDS.size]
    (crc,) = _CHECKSUM.unpack(header[_FIELDS.size : HEADER_BYTES])
    magic, version, group, weights, _, _, _, num_bytes, _ = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or crc != zlib.crc32(fields):
        return None
    return FileFacts(group, weights.hex(), num_bytes)


def is_whole(data: bytes, key: str) -> bool:
    """Return whether a file is whole and matches its name, whatever its maker."""
    facts, found = read_facts(data), KEY.fullmatch(key)
    if facts is None or found is None or len(data) != HEADER_BYTES + facts.num_bytes:
        return False
    *_, digest, _, crc = _FIELDS.unpack(data[: _FIELDS.size])
    is_named = (str(facts.group), digest.hex()) == (found[2], found[3])
    return is_named and crc == zlib.crc32(memoryview(data)[HEADER_BYTES:])
