"""The process that decodes images: `python -m gpu_worker.media.decode_process`, each image in a limited fork.

Encoded bytes and pixels pass through shared memory; the pipe carries where they are. Pillow decodes.
"""

from __future__ import annotations

import errno
import importlib
import mmap
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from shared import limited_process
from shared.image_header import JPEG, ImageHeader, ImageProblemError, read_header
from shared.limited_process import Limits, renew_processor_time

if TYPE_CHECKING:
    from PIL.Image import Image
import re
import struct

# Each scan makes the decoder go through all pixels, and takes as few as 59 bytes. Encoders write about ten.
MAX_SCANS = 64
_MAX_MARKERS = 4096
_SOS, _EOI, _FIRST_WITH_LENGTH = 0xDA, 0xD9, 0xC0
# Bytes between markers are skipped, as decoders skip them. Zeros and restarts belong to the data of a scan.
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


LIMITS = Limits(cpu_s=10.0, time_s=30.0, memory_bytes=1 << 30, stack_bytes=8 << 20)
"""64 million pixels take up to 0.8 GB."""
_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
# What Pillow calls the turn that brings an image of an orientation upright.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class DecodeWork(msgspec.Struct, frozen=True):
    """An image to decode, and its limit in seconds of processor time."""

    source: str
    target: str
    mime: str
    width: int
    height: int
    cpu_s: float


def work(message: bytes) -> bytes:
    """Decode an image; return the error, or nothing."""
    try:
        asked = msgspec.msgpack.decode(message, type=DecodeWork)
        renew_processor_time(asked.cpu_s)
        _decode(asked)
    except ImageProblemError as error:
        return str(error).encode()
    return b""


def _decode(asked: DecodeWork) -> None:
    from PIL import Image, UnidentifiedImageError

    with open(asked.source, "rb") as source:
        data = source.read()
        header = read_header(data)
        if (header.mime, header.width, header.height) != (asked.mime, asked.width, asked.height):
            found, said = f"{header.width}x{header.height}", f"{asked.width}x{asked.height}"
            raise ImageProblemError(f"is {header.mime} of {found}; its reference says {asked.mime} of {said}.")
        if header.mime == JPEG:
            check_scans(data)
        del data
        source.seek(0)
        # The size was checked against the reference, which has limits of its own.
        Image.MAX_IMAGE_PIXELS = None
        try:
            with Image.open(source, formats=[_FORMATS[header.mime]]) as image:
                # Phones write further pictures behind a JPEG (gain maps, depth): the first one is the photo.
                num_frames = 1 if header.mime == JPEG else getattr(image, "n_frames", 1)
                if image.size != (header.stored_width, header.stored_height) or num_frames != 1:
                    raise ImageProblemError("is broken: its frames have another size or number than its header says.")
                _write(np.asarray(_upright(image, header)), asked.target)
        except (ImageProblemError, MemoryError):
            raise
        except UnidentifiedImageError:
            # Its message names the open file.
            problem = f"is broken: what follows its header is no {_FORMATS[header.mime]} that can be read."
            raise ImageProblemError(problem) from None
        except Exception as error:
            # Pillow's decoders raise what happens to go wrong in them.
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError from None
            reason = str(error).partition("\n")[0].replace(asked.source, "it")[:100]
            raise ImageProblemError(f"is broken: {reason or type(error).__name__}.") from None


def _upright(image: Image, header: ImageHeader) -> Image:
    from PIL import Image as images

    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = images.new("RGB", above.size, "white")
        image.paste(above, mask=above.getchannel("A"))
    elif image.mode != "RGB":
        image = image.convert("RGB")
    turn = _TURNS.get(header.orientation)
    return image if turn is None else image.transpose(images.Transpose[turn])


def _write(pixels: npt.NDArray[np.uint8], target: str) -> None:
    with open(target, "r+b") as file, mmap.mmap(file.fileno(), pixels.nbytes) as memory:
        # Not through `bytes`: of the largest image that would be as much memory once more.
        written = np.frombuffer(memory, np.uint8)
        written[:] = pixels.reshape(-1)
        del written


def main() -> None:
    """Load what decoders need, once for all forks, and serve."""
    from PIL import Image

    importlib.import_module("PIL.WebPImagePlugin")
    # The other formats, and those that each fork would import before it opens its first image.
    Image.preinit()
    limited_process.run(work, LIMITS)


if __name__ == "__main__":
    main()
