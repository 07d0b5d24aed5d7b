"""How many scans a JPEG has. Each makes the decoder go through all of its pixels, and takes as few as 59 bytes."""

from __future__ import annotations

import re
import struct

from shared.image_header import ImageProblemError

MAX_SCANS = 64
"""Encoders write ten or so."""
_MAX_MARKERS = 4096
_SOS, _EOI, _FIRST_WITH_LENGTH = 0xDA, 0xD9, 0xC0
# What is between markers is skipped, as decoders skip it. Zeros and restarts belong to the data of a scan.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd8])")


def check_scans(data: bytes) -> None:
    """Refuse a JPEG of too many scans.

    Raises:
        ImageProblemError: It has too many scans, or markers.
    """
    at, num_scans = 2, 0
    for _ in range(_MAX_MARKERS):
        found = _MARKER.search(data, at)
        if found is None:
            return
        marker, at = data[found.start(1)], found.end()
        if marker == _EOI:
            return
        num_scans += marker == _SOS
        if num_scans > MAX_SCANS:
            raise ImageProblemError(f"has more than {MAX_SCANS} scans. Save it as a baseline JPEG.")
        # Decoders pass over markers that are not defined, without a length.
        if marker >= _FIRST_WITH_LENGTH and at + 2 <= len(data):
            at += struct.unpack_from(">H", data, at)[0]
    raise ImageProblemError(f"has more than {_MAX_MARKERS} markers, which is the most that is read of a JPEG.")
