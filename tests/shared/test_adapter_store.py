"""Paths that are no adapter are refused at once, whatever their files are."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import adapter_files, adapter_store
from shared.adapter_files import (
    CONFIG_NAME,
    MAX_ADAPTER_BYTES,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_TOLD_RANK,
    WEIGHTS_NAME,
    AdapterFilesError,
    content_digest,
    read_content,
)
from shared.adapter_store import AdapterStore
from shared.objects.directory import DirectoryStore
from tests.shared.stored_adapters import CONFIG, entry, weights, write_stored


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
async def test_pipe_device_or_folder_in_place_of_a_file_is_refused_without_waiting(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    (write_stored(tmp_path) / name).unlink()
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
    content = read_content(write_stored(tmp_path, config=f'{{"peft_type": "LORA", "r": {rank}}}'))
    assert (content.rank, type(content.rank)) == (told, int)


_LONG = struct.pack("<Q", MAX_HEADER_BYTES + 1)


@pytest.mark.parametrize(
    ("config", "start", "problem"),
    [
        ("[]", weights({}), "adapter_config.json has peft_type 'None'; it must be 'LORA'"),
        ('{"peft_type": "LOHA"}', weights({}), "adapter_config.json has peft_type 'LOHA'; it must be 'LORA'"),
        ("[" * 100_000, weights({}), "adapter_config.json is not JSON"),
        (CONFIG, bytes(8), "its header cannot be read"),
        (CONFIG, _LONG, f"its header has {MAX_HEADER_BYTES + 1} bytes in a file of 8588886016"),
        (CONFIG, struct.pack("<Q", 9) + b'{"a":[[[[', "its header cannot be read"),
        (CONFIG, weights({"a": entry([7], 0, 7)}), "its tensors have 7 bytes, and 8588885948 stand"),
        (CONFIG, weights({"a": entry([8], 0, 7)}), r"its tensor 'a' of shape \[8\] in U8 cannot be at bytes 0 to 7"),
        (CONFIG, weights({"a": entry([7], 1, 8)}), r"'a' of shape \[7\] in U8 cannot be at bytes 1 to 8"),
        (CONFIG, weights({"a": entry([2**40] * 8, 0, 0, "F32")}), "cannot be at bytes 0 to 0"),
        (CONFIG, weights({"a": entry([1] * 9, 0, 1)}), "its header cannot be read"),
    ],
)
async def test_vast_file_is_refused_before_it_is_hashed(
    config: str, start: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stored(tmp_path, config=config)
    (tmp_path / WEIGHTS_NAME).write_bytes(start)
    os.truncate(tmp_path / WEIGHTS_NAME, MAX_ADAPTER_BYTES - MAX_CONFIG_BYTES)
    monkeypatch.setattr(adapter_files, "content_digest", None)
    store = AdapterStore(DirectoryStore(tmp_path / "store"))
    with pytest.raises(AdapterFilesError, match=problem) as raised:
        await store.put(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "store").exists()
    await store.close()


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_file_without_a_header_is_refused(num_bytes: int, tmp_path: Path) -> None:
    (write_stored(tmp_path) / WEIGHTS_NAME).write_bytes(bytes(num_bytes))
    with pytest.raises(AdapterFilesError, match=f"its header has 0 bytes in a file of {num_bytes}"):
        read_content(tmp_path)


async def test_large_adapter_is_checked_by_its_header_before_the_rest_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 40_000
    monkeypatch.setattr(adapter_store, "CHECKED_FIRST_BYTES", len(content))
    monkeypatch.setattr(adapter_store, "PIECE_BYTES", 1 << 20)
    store, fetched, seen = AdapterStore(DirectoryStore(tmp_path / "store")), tmp_path / "fetched", []
    large = await store.put(write_stored(tmp_path / "large", content))
    small = await store.put(write_stored(tmp_path / "small"))
    fetched.mkdir()

    def check(directory: Path) -> None:
        seen.append((directory / WEIGHTS_NAME).read_bytes())

    for stored in (large, small):
        assert await store.fetch(stored.digest, fetched, check=check) == stored.num_bytes
        assert content_digest(fetched) == stored.digest
    whole = (tmp_path / "large" / WEIGHTS_NAME).read_bytes()
    assert seen == [whole[: 1 << 20] + bytes(len(whole) - (1 << 20))]

    def refuse(_: Path) -> None:
        raise AdapterFilesError("of another model")

    reads: list[int] = []
    read = DirectoryStore.read

    async def counted(self: DirectoryStore, key: str, start: int, count: int) -> bytes:
        reads.append(start)
        return await read(self, key, start, count)

    monkeypatch.setattr(DirectoryStore, "read", counted)
    with pytest.raises(AdapterFilesError, match="of another model"):
        await store.fetch(large.digest, fetched, check=refuse)
    assert max(reads) < 1 << 20
    await store.close()


async def test_adapter_that_changes_while_it_is_stored_leaves_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, store = write_stored(tmp_path / "adapter"), AdapterStore(DirectoryStore(tmp_path / "store"))
    keep = AdapterStore.keep

    async def change(self: AdapterStore, digest: str) -> int | None:
        write_stored(adapter, b"another")
        return await keep(self, digest)

    monkeypatch.setattr(AdapterStore, "keep", change)
    with pytest.raises(AdapterFilesError, match="changed while it was read"):
        await store.put(adapter)
    assert not list((tmp_path / "store").rglob("*.safetensors"))
    await store.close()
