"""Adapters of any content as stores see them: two files, whose header describes the bytes behind it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from shared.adapter_files import CONFIG_NAME, WEIGHTS_NAME

CONFIG = '{"peft_type": "LORA", "r": 8}'


def weights(header: dict[str, Any], content: bytes = b"") -> bytes:
    """Return a file of this header and content."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    """Return what a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_stored(directory: Path, content: bytes = b"weights", config: str = CONFIG) -> Path:
    """Write both files, the weights with this content."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(config)
    (directory / WEIGHTS_NAME).write_bytes(weights({"a": entry([len(content)], 0, len(content))}, content))
    return directory
