"""Paths that are no adapter are refused at once, whatever their files are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.adapter_store import CONFIG_NAME, MAX_TOLD_RANK, WEIGHTS_NAME, AdapterFilesError, AdapterStore, read_content
from shared.objects.directory import DirectoryStore


def _adapter(directory: Path, config: str = '{"r": 8}') -> Path:
    (directory / CONFIG_NAME).write_text(config)
    (directory / WEIGHTS_NAME).write_bytes(b"weights")
    return directory


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
async def test_pipe_device_or_folder_in_place_of_a_file_is_refused_without_waiting(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    (_adapter(tmp_path) / name).unlink()
    make(tmp_path / name)
    store = AdapterStore(DirectoryStore(tmp_path / "store"))
    async with asyncio.timeout(5):
        with pytest.raises(AdapterFilesError, match=rf"{name} is missing or cannot be read \(it is not an ordinary"):
            await store.put(tmp_path)
    await store.close()


@pytest.mark.parametrize(
    ("rank", "told"),
    [("8", 8), (str(MAX_TOLD_RANK), MAX_TOLD_RANK), (str(10**30), 0), (str(MAX_TOLD_RANK + 1), 0), ("-1", 0),
     ("true", 0), ("8.0", 0), ("null", 0)],
)  # fmt: skip
def test_rank_is_told_where_it_is_one(rank: str, told: int, tmp_path: Path) -> None:
    content = read_content(_adapter(tmp_path, f'{{"r": {rank}}}'))
    assert (content.rank, type(content.rank)) == (told, int)
