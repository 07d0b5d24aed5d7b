"""Files of blocks: what was stored is found after a restart, and nothing else is ever loaded."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.execution.memory.block_bytes import Bytes
from gpu_worker.execution.tiers.block_files import BlockFiles
from gpu_worker.execution.tiers.file_format import HEADER_BYTES, Maker
from gpu_worker.execution.tiers.file_index import FileIndex
from gpu_worker.execution.tiers.file_store import (
    ABANDONED_S,
    BucketStore,
    DirectoryStore,
    FileStore,
    Folder,
    StoredFile,
)
from gpu_worker.execution.tiers.host_tier import HostTier, Kept
from shared.errors import ConfigError
from shared.files import AtomicFile
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.execution.tiered_engine import BLOCK, OPENED, Models, Served, sequence
from tests.shared.objects.small_s3 import small_s3
from tests.waiting import wait_for

MAKER = Maker(b"w" * 32, (b"a" * 32, b"b" * 32))
ROW_BYTES = 300
SALT = b"tenant"
DIGESTS = [bytes([number]) * 32 for number in range(50)]


def serve_with(
    store: FileStore, models: Models, name: str, *, weights: bytes = b"w" * 32, host_bytes: int = 1 << 22
) -> Served:
    runner = models.open(name)
    groups = runner.block_contents

    def make(host: HostTier) -> BlockFiles:
        maker = Maker(weights, tuple(bytes([number]) * 32 for number, _ in enumerate(groups)))
        return BlockFiles(store, groups, [BLOCK] * len(groups), 1 << 30, host, lambda: maker)

    served = Served(runner, host_bytes, make)
    wait_for(files_of(served).is_ready.is_set)
    return served


def files_of(served: Served) -> BlockFiles:
    assert served.tiers is not None
    files = served.tiers._files
    assert isinstance(files, BlockFiles)
    return files


def settle(served: Served) -> None:
    """Wait until all is written that is to be."""
    assert served.tiers is not None
    served.tiers.drain(30)


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "kv")
        return
    pytest.importorskip("obstore")
    with small_s3() as url:
        for name, value in {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "r"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield BucketStore("s3://bucket/some/prefix")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_a_worker_that_starts_again_finds_what_was_stored_and_gives_the_same_answers(
    name: str, models: Models, tmp_path: Path
) -> None:
    prompts = [random_prompt(61, seed=seed) for seed in range(3)]
    first = serve_with(DirectoryStore(tmp_path), models, name)
    expected = [first.serve(sequence(str(number), prompt))[0] for number, prompt in enumerate(prompts)]
    settle(first)
    again = serve_with(DirectoryStore(tmp_path), models, name)
    later = [sequence(str(number), prompt) for number, prompt in enumerate(prompts)]
    assert [again.serve(each)[0] for each in later] == expected
    assert [each.num_cached_tokens for each in later] == [60, 60, 60]
    assert again.hit_tokens("disk") == 180


def test_a_bucket_and_a_directory_keep_the_same_promises(store: FileStore) -> None:
    store.write("m/0/ab/x.kv", [b"head", memoryview(b"content")])
    store.write("m/0/ab/x.kv", [b"head", memoryview(b"other")])
    store.write("m/1/cd/y.kv", [b""])
    assert store.read("m/0/ab/x.kv", 9) == b"headother"
    assert store.read("m/0/ab/x.kv", 8) == b"", "what is too long is not read"
    with pytest.raises(FileNotFoundError):
        store.read("m/0/ab/none.kv", 9)
    listed = {key: file.num_bytes for folder in store.folders() for key, file in store.files(folder.name).items()}
    assert listed == {"m/0/ab/x.kv": 9, "m/1/cd/y.kv": 0}
    store.delete("m/0/ab/x.kv")
    store.delete("m/0/ab/x.kv")
    assert [key for folder in store.folders() for key in store.files(folder.name)] == ["m/1/cd/y.kv"]


def test_another_worker_that_shares_the_store_finds_what_one_has_written(
    store: FileStore, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever looks into a store does so as long as the process lives: no more often than usual after this test.
    monkeypatch.setattr(store, "refresh_s", 0.02)
    one, other, stranger = (
        serve_with(store, models, "llama", weights=weights) for weights in (b"w" * 32, b"w" * 32, b"v" * 32)
    )
    prompt = random_prompt(61, seed=4)
    written = sequence("one", prompt)
    expected = one.serve(written)
    settle(one)
    wait_for(lambda: all(files_of(other).has(0, digest) for digest in written.block_digests[:15]))
    assert other.serve(sequence("two", prompt)) == expected
    assert other.hit_tokens(store.name) == 60
    stranger.serve(sequence("three", prompt))
    assert stranger.hit_tokens(store.name) == 0


def content(digest: bytes) -> bytes:
    return np.random.default_rng(list(digest)).bytes(ROW_BYTES)


class Rows:
    """A host's memory that has all contents, made from their digests."""

    def __init__(self) -> None:
        self.forgotten: set[bytes] = set()
        self.during: Callable[[], None] = lambda: None

    def pinned(self, group: int, digest: bytes) -> object:
        self.during()
        return nullcontext(np.frombuffer(content(digest), dtype=np.uint8).copy())

    def is_current(self, group: int, digest: bytes, row: Bytes) -> bool:
        return digest not in self.forgotten

    def knows(self, group: int, digest: bytes) -> bool:
        return False


def open_files(
    directory: Path,
    max_bytes: int = 1 << 30,
    rows: Rows | None = None,
    store: FileStore | None = None,
    retained_share: float = 0.0,
) -> BlockFiles:
    groups = [SimpleNamespace(row_bytes=ROW_BYTES)] * 2
    used = store or DirectoryStore(directory)
    files = BlockFiles(used, groups, [16, 16], max_bytes, rows or Rows(), lambda: MAKER, retained_share)  # type: ignore[arg-type]
    OPENED.callback(files.close, 1.0)
    wait_for(files.is_ready.is_set)
    return files


def stored(maker: Maker, group: int, digest: bytes, salt: bytes = SALT) -> bytes:
    payload = memoryview(content(digest))
    return maker.header(group, digest, salt, payload) + payload


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_file_is_loaded_that_is_not_whole_and_the_one_that_is_wanted(tmp_path: Path, count: int) -> None:
    files, generator = open_files(tmp_path), random.Random(8)
    other_weights, other_layout = replace(MAKER, weights=b"x" * 32), replace(MAKER, layouts=(b"z" * 32, b"b" * 32))
    num_refused = 0
    for number in range(count):
        digest, foreign = generator.randbytes(32), generator.randbytes(32)
        right, swapped = stored(MAKER, 0, digest), stored(MAKER, 0, foreign)
        flipped, cut = bytearray(right), right[: generator.randrange(len(right))]
        for place in generator.sample(range(8 * len(right)), generator.choice([1, 1, 1, 2, 9])):
            flipped[place // 8] ^= 1 << place % 8
        wrong = (
            bytes(flipped),
            cut,
            cut + bytes(len(right) - len(cut)),
            right + b"x",
            swapped,
            right[:HEADER_BYTES] + swapped[HEADER_BYTES:],
            stored(other_weights, 0, digest),
            stored(other_layout, 0, digest),
            stored(MAKER, 1, digest),
            stored(MAKER, 0, digest, b"another tenant"),
        )[number % 10]
        path = tmp_path / MAKER.key(0, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        if wrong == right:
            continue
        path.write_bytes(wrong)
        assert files.read(0, digest, SALT) is None, number
        assert not path.exists(), "it stays to be read again"
        num_refused += 1
        path.write_bytes(right)
        found = files.read(0, digest, SALT)
        assert found is not None
        assert found.tobytes() == content(digest)
        path.unlink()
    assert files.num_refused == num_refused > 0.99 * count


def test_files_that_were_damaged_are_computed_again_and_answers_stay(models: Models, tmp_path: Path) -> None:
    prompt = random_prompt(61, seed=5)
    first = serve_with(DirectoryStore(tmp_path), models, "llama")
    expected = first.serve(sequence("first", prompt))
    settle(first)
    generator = random.Random(3)
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    again = serve_with(DirectoryStore(tmp_path), models, "llama")
    assert again.serve(sequence("again", prompt)) == expected
    assert again.hit_tokens("disk") == 0
    assert files_of(again).num_refused > 0


class BrokenStore(DirectoryStore):
    """A disk that is full, whose reads hang or fail, or that cannot be listed."""

    ending = "nothing"
    error = errno.EIO
    is_listed = True
    is_full = False
    undeletable = "nothing"
    watcher = 0
    never: threading.Event | None = None

    def write(self, key: str, parts: object) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(key, parts)  # type: ignore[arg-type]

    def read(self, key: str, most_bytes: int) -> bytes:
        if self.never is not None:
            self.never.wait()
        if key.endswith(self.ending):
            raise OSError(self.error, os.strerror(self.error))
        return super().read(key, most_bytes)

    def delete(self, key: str) -> None:
        if key.endswith(self.undeletable):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        super().delete(key)

    def folders(self) -> Iterable[Folder]:
        self.watcher = threading.get_ident()
        if not self.is_listed:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().folders()


def test_a_full_disk_costs_hits_only(models: Models, tmp_path: Path) -> None:
    prompt = random_prompt(61, seed=6)
    store = BrokenStore(tmp_path)
    store.is_full = True
    served = serve_with(store, models, "llama")
    expected = served.serve(sequence("first", prompt))
    wait_for(lambda: files_of(served).num_failed > 0)
    served.fill()
    assert served.serve(sequence("again", prompt)) == expected
    assert served.hit_tokens("host") > 0
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_disk_that_hangs_costs_a_second_once(models: Models, tmp_path: Path) -> None:
    prompts = [random_prompt(61, seed=seed) for seed in (7, 8)]
    first = serve_with(DirectoryStore(tmp_path), models, "llama")
    expected = [first.serve(sequence(str(number), prompt)) for number, prompt in enumerate(prompts)]
    settle(first)
    store = BrokenStore(tmp_path)
    store.never = threading.Event()
    again = serve_with(store, models, "llama")
    assert again.serve(sequence("0", prompts[0])) == expected[0]
    assert not files_of(again).has(0, first.scheduler._blocks.digest_of(sequence("known", prompts[1]), 0))
    assert again.serve(sequence("1", prompts[1])) == expected[1]
    assert again.hit_tokens("disk") == 0
    store.never.set()


def test_what_other_tiers_have_comes_back_while_a_disk_hangs(models: Models, tmp_path: Path) -> None:
    on_disk, in_memory = (random_prompt(61, seed=seed) for seed in (7, 8))
    first = serve_with(DirectoryStore(tmp_path), models, "llama")
    first.serve(sequence("first", on_disk))
    settle(first)
    store = BrokenStore(tmp_path)
    store.never = threading.Event()
    again = serve_with(store, models, "llama")
    # Each of its reads hangs, and takes a thread with it.
    again.serve(sequence("hangs", on_disk))
    expected = again.serve(sequence("computed", in_memory))
    again.fill()
    restored = sequence("restored", in_memory)
    assert again.serve(restored) == expected
    assert restored.num_cached_tokens >= 48
    assert again.hit_tokens("host") > 0
    store.never.set()


def broken_files(tmp_path: Path, count: int = 0) -> tuple[BrokenStore, BlockFiles, list[bytes]]:
    """Give files in a store that can be broken, with so many contents in it."""
    store, digests = BrokenStore(tmp_path), DIGESTS[:count]
    for digest in digests:
        DirectoryStore.write(store, MAKER.key(0, digest), [stored(MAKER, 0, digest)])
    return store, open_files(tmp_path, store=store), digests


def test_a_directory_that_cannot_be_listed_is_asked_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.01)
    store, files, (digest,) = broken_files(tmp_path, 1)
    pauses: list[float] = []
    now, wait = [time.monotonic()], files._to_do.get

    def note(*, timeout: float) -> Callable[[], None]:
        # Those before it breaks are not counted.
        if not store.is_listed:
            pauses.append(timeout)
        now[0] += timeout
        return wait(timeout=0.001)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("gpu_worker.execution.tiers.block_files.time", clock)
    monkeypatch.setattr(files._to_do, "get", note)
    store.is_listed = False
    wait_for(lambda: len(pauses) >= 21)
    store.is_listed = True
    longer = [pause for pause in pauses if pause > 0.015]
    assert longer[:3] == pytest.approx([0.02, 0.04, 0.08], rel=1e-3)
    assert pauses[20] == pytest.approx(60)
    assert sum("cannot be listed" in record.message for record in caplog.records) == 1
    # It goes on once the directory is back.
    other = b"o" * 32
    DirectoryStore.write(store, MAKER.key(0, other), [stored(MAKER, 0, other)])
    wait_for(lambda: files.has(0, other))
    assert files.has(0, digest)


@pytest.mark.parametrize("step", ["_delete_again", "_make_room"])
def test_a_thread_that_can_do_nothing_waits_before_it_looks_again(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.01)
    did: list[str] = []

    def look(store: BrokenStore) -> Iterable[Folder]:
        did.append("look")
        return DirectoryStore.folders(store)

    def fail(_: BlockFiles) -> None:
        did.append("fail")
        raise ValueError("not what a disk says")

    def wait(self: Queue[object], timeout: float) -> object:
        did.append("wait")
        return get(self, timeout=timeout)

    get = Queue.get
    monkeypatch.setattr(BrokenStore, "folders", look)
    monkeypatch.setattr(BlockFiles, step, fail)
    _, files, _ = broken_files(tmp_path)
    monkeypatch.setattr(files._to_do, "get", partial(wait, files._to_do))
    did.clear()
    wait_for(lambda: did.count("fail") > 10)
    seen = "".join(each[0] for each in did)
    assert "lfl" not in seen, "it looks at once"
    assert "lfwlfw" in seen


def test_a_file_that_is_written_again_is_not_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.01)
    store, files, (digest,) = broken_files(tmp_path, 1)
    key, size = MAKER.key(0, digest), ROW_BYTES + HEADER_BYTES
    DirectoryStore.write(store, key, [bytes(size)])
    store.undeletable = ".kv"
    assert files.read(0, digest, SALT) is None
    assert files._undeleted == {key: size}

    def write(key: str, parts: list[bytes]) -> None:
        DirectoryStore.write(store, key, parts)
        store.undeletable = "nothing"
        looked.clear()
        for _ in range(3):
            assert looked.wait(30)
            looked.clear()

    def look() -> Iterable[Folder]:
        looked.set()
        return DirectoryStore.folders(store)

    looked = threading.Event()
    monkeypatch.setattr(store, "write", write)
    monkeypatch.setattr(store, "folders", look)
    files.add(Kept(0, digest, SALT))
    wait_for(lambda: files.stored_bytes > 0)
    assert files.read(0, digest, SALT) is not None
    assert files.has(0, digest)
    assert files.reading(0, 0).used_bytes == size


def test_a_file_that_cannot_be_deleted_counts_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.execution.tiers.block_files.WRITE_PAUSE_S", 0.05)
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.02)
    store, size = BrokenStore(tmp_path), ROW_BYTES + HEADER_BYTES
    store.undeletable = ".kv"
    files = open_files(tmp_path, max_bytes=10 * size, store=store)

    def write(number: int) -> None:
        wait_for(lambda: time.monotonic() > files._paused_until)
        files.add(Kept(0, DIGESTS[number], SALT))
        files.drain(10.0)

    for number in range(11):
        write(number)
    assert files.num_failed > 0
    assert files.reading(0, 0).used_bytes == 11 * size == size * len(list(tmp_path.rglob("*.kv")))
    assert files.num_evicted == 0
    # One file alone, as one of another user, is passed over.
    store.undeletable = MAKER.key(0, DIGESTS[0])
    for number in range(11, 15):
        write(number)
    wait_for(lambda: files.reading(0, 0).used_bytes == 10 * size)
    assert len(list(tmp_path.rglob("*.kv"))) == 10
    assert not files.has(0, DIGESTS[0])
    store.undeletable = "nothing"
    wait_for(lambda: files.reading(0, 0).used_bytes == 9 * size)
    assert not (tmp_path / MAKER.key(0, DIGESTS[0])).exists()


def test_a_huge_file_that_cannot_be_deleted_leaves_half_of_the_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.execution.tiers.block_files.WRITE_PAUSE_S", 0.05)
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.02)
    store, size = BrokenStore(tmp_path), ROW_BYTES + HEADER_BYTES
    files = open_files(tmp_path, max_bytes=10 * size, store=store)
    for digest in DIGESTS[:4]:
        files.add(Kept(0, digest, SALT))
    files.drain(10.0)
    store.undeletable = foreign = replace(MAKER, weights=b"x" * 32).key(0, DIGESTS[49])
    DirectoryStore.write(store, foreign, [b""])
    os.truncate(tmp_path / foreign, 1 << 40)
    wait_for(lambda: foreign in files._undeleted)
    looked = threading.Event()
    files._to_do.put(looked.set)
    assert looked.wait(30)
    assert all(files.has(0, digest) for digest in DIGESTS[:4])
    wait_for(lambda: time.monotonic() > files._paused_until)
    for digest in DIGESTS[4:12]:
        files.add(Kept(0, digest, SALT))
    files.drain(10.0)
    wait_for(lambda: files.num_evicted == 7)
    assert sum(files.read(0, digest, SALT) is not None for digest in DIGESTS) == 5


def test_a_folder_in_the_place_of_a_file_costs_that_content_alone(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    (tmp_path / MAKER.key(0, DIGESTS[0])).mkdir(parents=True)
    files.add(Kept(0, DIGESTS[0], SALT))
    files.drain(10.0)
    files.add(Kept(0, DIGESTS[1], SALT))
    files.drain(10.0)
    assert files.num_failed == 1
    assert files.read(0, DIGESTS[1], SALT) is not None


def test_a_file_is_deleted_although_its_directory_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokenStore, "refresh_s", 0.02)
    store, files, (digest,) = broken_files(tmp_path, 1)
    wait_for(lambda: files.has(0, digest))
    store.undeletable, store.is_listed = ".kv", False
    files.forget([digest])
    wait_for(lambda: files.num_failed > 5)
    store.undeletable = "nothing"
    wait_for(lambda: not (tmp_path / MAKER.key(0, digest)).exists())
    assert not store.is_listed


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_costs_itself_alone(tmp_path: Path, error: int) -> None:
    store, files, digests = broken_files(tmp_path, 20)
    store.ending, store.error = MAKER.key(0, digests[3]), error
    for _ in range(20):
        assert files.read(0, digests[3], SALT) is None
        assert files.read(0, digests[4], SALT) is not None
    assert [files.has(0, digest) for digest in digests] == [number != 3 for number in range(20)]
    assert files.num_failed == 20


@pytest.mark.parametrize(("error", "count"), [(errno.ESTALE, 1), (errno.EIO, 8)])
def test_a_disk_that_cannot_be_read_is_left_alone_for_a_while(tmp_path: Path, error: int, count: int) -> None:
    store, files, digests = broken_files(tmp_path, 20)
    store.ending, store.error = ".kv", error
    for digest in digests[:count]:
        assert files.has(0, digest)
        assert files.read(0, digest, SALT) is None
    assert not any(files.has(0, digest) for digest in digests)


def test_a_damaged_directory_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = open_files(tmp_path)
    for digest in DIGESTS:
        DirectoryStore(tmp_path).write(MAKER.key(0, digest), [b"damaged"])
        assert files.read(0, digest, SALT) is None
    assert files.num_refused == len(DIGESTS)
    assert sum("damaged" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC])
def test_a_worker_starts_with_a_disk_that_cannot_be_written_and_reads_what_is_there(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    DirectoryStore(tmp_path).write(MAKER.key(0, DIGESTS[0]), [stored(MAKER, 0, DIGESTS[0])])

    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "touch", fail)
    assert open_files(tmp_path).read(0, DIGESTS[0], SALT) is not None
    error = errno.EACCES
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        DirectoryStore(tmp_path)


@pytest.mark.parametrize("is_new", [True, False])
def test_no_other_user_sees_which_prompts_were_computed(tmp_path: Path, is_new: bool) -> None:
    tmp_path.chmod(0o755)
    root = tmp_path / "kv"
    if not is_new:
        root.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        store = DirectoryStore(root)
        store.write(MAKER.key(0, bytes(32)), [b"content"])
    finally:
        os.umask(before)
    path = (root / MAKER.key(0, bytes(32))).parent
    closed = [folder for folder in (path, *path.parents) if folder.stat().st_mode & 0o077 == 0]
    assert {root / MAKER.folder} <= set(closed), "a name is a digest of the prompt"
    assert (root in closed) is is_new


@pytest.mark.parametrize("kind", ["long", "pipe", "link", "socket", "directory"])
def test_what_is_not_a_file_of_the_right_length_is_neither_read_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _, files, (digest,) = broken_files(tmp_path, 1)
    path = tmp_path / MAKER.key(0, digest)
    path.unlink()
    if kind == "long":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        whole = tmp_path / "elsewhere"
        whole.write_bytes(stored(MAKER, 0, digest))
        path.symlink_to(whole)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.mkdir()
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("it is read"))
    assert files.read(0, digest, SALT) is None
    assert files.num_refused == 1
    assert path.is_dir() if kind == "directory" else not path.is_symlink() and not path.exists()
    assert MAKER.key(0, digest) not in DirectoryStore(tmp_path).files(str(path.parent.relative_to(tmp_path)))


@pytest.mark.parametrize("is_found", [False, True])
def test_a_file_that_is_written_again_or_grew_counts_once_with_its_bytes(is_found: bool) -> None:
    index, key = FileIndex(lambda kind: 16), "m/0/00/a.kv"
    for num_bytes in (1000, 5000):
        if is_found:
            index.renew("m/0/00", {key: StoredFile(num_bytes, 0.0)}, time.monotonic())
        else:
            index.add(key, num_bytes)
        assert (key in index, index.num_bytes) == (True, num_bytes)
    assert (index.pop_cheapest(), index.pop_cheapest(), index.num_bytes) == ((key, 5000), None, 0)


def test_what_another_worker_is_writing_stays_although_the_clock_here_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m" / "0" / "ab"
    folder.mkdir(parents=True)
    file = AtomicFile(folder / "written.kv")
    file.write(b"1" * 100)
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 12 * ABANDONED_S)
    store = DirectoryStore(tmp_path)
    assert store.files("m/0/ab") == {}
    file.commit()
    assert list(store.files("m/0/ab")) == ["m/0/ab/written.kv"]


POINTS = ("os.open", "os.write", "os.fsync", "os.replace")


@pytest.mark.parametrize("point", POINTS)
def test_what_a_process_was_writing_when_it_was_killed_is_never_seen(tmp_path: Path, point: str) -> None:
    """The process is killed as it calls one of the functions that a write consists of."""
    program = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from gpu_worker.execution.tiers.file_store import DirectoryStore
        store = DirectoryStore(Path({str(tmp_path)!r}))
        store.write("m/0/ab/before.kv", [b"1" * 100])
        original = {point}
        def kill(*args, **options):
            if {point!r} == "os.write":
                original(args[0], bytes(args[1])[:50])
            os.kill(os.getpid(), signal.SIGKILL)
        {point} = kill
        store.write("m/0/ab/after.kv", [b"2" * 100])
    """)
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    store = DirectoryStore(tmp_path)
    assert list(store.files("m/0/ab")) == ["m/0/ab/before.kv"]
    for path in tmp_path.rglob(".writing-*"):
        os.utime(path, (1.0, time.time() - ABANDONED_S - 1))
    store.files("m/0/ab")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["before.kv"]


def test_leftover_that_cannot_be_deleted_hides_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.write(MAKER.key(0, DIGESTS[0]), [stored(MAKER, 0, DIGESTS[0])])
    leftover = (tmp_path / MAKER.key(0, DIGESTS[0])).with_name(".writing-left")
    leftover.write_bytes(b"half")
    os.utime(leftover, (1.0, 1.0))

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    files = open_files(tmp_path, store=store)
    wait_for(lambda: files.has(0, DIGESTS[0]))
    assert files.read(0, DIGESTS[0], SALT) is not None


def test_bytes_are_bounded_and_what_was_used_stays(tmp_path: Path) -> None:
    size = ROW_BYTES + HEADER_BYTES
    files = open_files(tmp_path, max_bytes=10 * size)
    for number, digest in enumerate(DIGESTS[:30]):
        files.add(Kept(0, digest, SALT))
        wait_for(lambda digest=digest: files.has(0, digest))  # type: ignore[misc]
        if number:
            assert files.read(0, DIGESTS[0], SALT) is not None
    wait_for(lambda: files.num_evicted == 20)
    assert len(list(tmp_path.rglob("*.kv"))) == 10
    assert [files.has(0, DIGESTS[number]) for number in (0, 1, 29)] == [True, False, True]
    assert files.reading(0, 0).used_bytes == 10 * size


def cheapest(index: FileIndex, count: int) -> list[str]:
    """Take out the cheapest files, `count` of them, and return their keys."""
    taken = [index.pop_cheapest() for _ in range(count)]
    return [each[0] for each in taken if each is not None]


def test_content_that_costs_more_to_compute_for_its_bytes_stays_longer() -> None:
    index = FileIndex(lambda kind: {"m/0": 16, "m/1": 1024}[kind])
    for number in range(4):
        index.add(f"m/1/00/{number}.kv", 1000)
        index.add(f"m/0/00/{number}.kv", 1000)
    assert cheapest(index, 4) == [f"m/0/00/{number}.kv" for number in range(4)]
    assert index.num_bytes == 4000
    # Those that are not used grow old beside cheap ones that are.
    for number in range(4, 400):
        index.add(f"m/0/00/{number}.kv", 1000)
        index.pop_cheapest()
    assert "m/1/00/0.kv" not in index


def test_what_is_forgotten_while_it_is_written_does_not_stay(tmp_path: Path) -> None:
    rows = Rows()
    files, digest = open_files(tmp_path, rows=rows), b"d" * 32
    rows.during = lambda: (rows.forgotten.add(digest), files.forget([digest]))[0]
    files.add(Kept(0, digest, SALT))
    wait_for(lambda: files.stored_bytes > 0)
    assert not files.has(0, digest)
    wait_for(lambda: not list(tmp_path.rglob("*.kv")))


def test_what_is_forgotten_is_not_found_while_it_waits_to_be_deleted(tmp_path: Path) -> None:
    is_deleting, may_delete = threading.Event(), threading.Event()

    class SlowStore(DirectoryStore):
        def delete(self, key: str) -> None:
            is_deleting.set()
            assert may_delete.wait(30)
            super().delete(key)

    store, digests = SlowStore(tmp_path), (b"d" * 32, b"e" * 32)
    for digest in digests:
        store.write(MAKER.key(0, digest), [stored(MAKER, 0, digest)])
    files = open_files(tmp_path, store=store)
    assert files.has(0, digests[1])
    files.forget(digests[:1])
    assert is_deleting.wait(30)
    files.forget(digests[1:])
    assert not files.has(0, digests[1])
    assert files.read(0, digests[1], SALT) is None
    may_delete.set()
    wait_for(lambda: not list(tmp_path.rglob("*.kv")))


@pytest.mark.parametrize("is_closed", [False, True], ids=["later", "at the end"])
def test_what_is_forgotten_is_deleted_although_a_delete_fails(tmp_path: Path, is_closed: bool) -> None:
    class StaleStore(DirectoryStore):
        fails = True

        def delete(self, key: str) -> None:
            if self.fails and key == MAKER.key(0, DIGESTS[0]):
                raise OSError(errno.ESTALE, "stale")
            super().delete(key)

    store = StaleStore(tmp_path)
    for digest in DIGESTS:
        store.write(MAKER.key(0, digest), [stored(MAKER, 0, digest)])
    files = open_files(tmp_path, store=store)
    files.forget(DIGESTS)
    wait_for(lambda: len(list(tmp_path.rglob("*.kv"))) == 1)
    assert not files.has(0, DIGESTS[0])
    assert files.read(0, DIGESTS[0], SALT) is None
    store.fails = False
    if is_closed:
        files.close(30)
        assert not list(tmp_path.rglob("*.kv"))
    wait_for(lambda: not list(tmp_path.rglob("*.kv")))


def test_a_worker_that_is_stopped_writes_what_it_has_computed(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    for digest in DIGESTS:
        files.add(Kept(0, digest, SALT))
    files.drain(30)
    assert len(list(tmp_path.rglob("*.kv"))) == 50


def test_of_closed_tiers_no_thread_is_left_and_nothing_is_found(models: Models, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    served = serve_with(DirectoryStore(tmp_path), models, "llama")
    asked = sequence("asked", random_prompt(61, seed=3))
    served.serve(asked)
    settle(served)
    files, digest = files_of(served), asked.block_digests[0]
    assert files.has(0, digest)
    assert served.tiers is not None
    served.tiers.close()
    wait_for(lambda: not [each for each in threading.enumerate() if each not in before and each.name[:3] == "kv-"])
    assert not files.has(0, digest)


def test_files_that_are_retained_are_deleted_last_and_spent_ones_first() -> None:
    now = [0.0]
    index = FileIndex(lambda kind: 16, retained_bytes=2000.0, clock=lambda: now[0])
    keys = [f"m/0/00/{number:02}.kv" for number in range(6)]
    # One file is retained before it is written; the third does not fit.
    index.retain("a", 1.0, keys[:3], 60.0, 1000)
    for key in keys:
        index.add(key, 1000)
    index.spend(keys[4:])
    assert cheapest(index, 5) == [keys[5], keys[4], keys[2], keys[3], keys[0]]
    index.add(keys[4], 1000)
    now[0] = 60.0
    index.add(keys[3], 1000)
    assert cheapest(index, 3) == [keys[1], keys[4], keys[3]]
    assert index.pop_cheapest() is None


@pytest.mark.parametrize("count", [60, 200])
def test_no_retained_file_is_deleted_while_others_are_there(count: int) -> None:
    index = FileIndex(lambda kind: 16, retained_bytes=1e9, clock=lambda: 0.0)
    retained = [f"m/0/00/retained {number:03}.kv" for number in range(count)]
    others = [f"m/0/00/other {number:03}.kv" for number in range(2 * count)]
    for key in retained:
        index.add(key, 1000)
    index.retain("a", 1.0, retained, 60.0, 1000)
    for key in others:
        index.add(key, 1000)
    assert cheapest(index, 2 * count) == others
    assert cheapest(index, count) == retained


@pytest.mark.parametrize("has_grown", [False, True])
def test_huge_file_is_deleted_before_others_of_its_folder(has_grown: bool) -> None:
    index = FileIndex(lambda kind: 16)
    keys = [f"m/0/00/{number:02}.kv" for number in range(10)]
    for key in keys:
        index.add(key, 1000)
    files = {key: StoredFile(1000, 0.0) for key in keys}
    huge = keys[-1] if has_grown else "m/0/00/huge.kv"
    index.renew("m/0/00", {**files, huge: StoredFile(1 << 40, 1.0)}, time.monotonic())
    assert cheapest(index, 3) == [huge, *keys[:2]]


def test_files_that_are_used_often_take_no_memory() -> None:
    index = FileIndex(lambda kind: 16)
    keys = [f"m/0/00/{number}.kv" for number in range(3)]
    for key in keys:
        index.add(key, 1000)
    for _ in range(1000):
        index.touch(keys[0])
    assert len(index._heap) < 100
    assert cheapest(index, 3) == [*keys[1:], keys[0]]


def test_spent_files_do_not_make_others_old() -> None:
    index = FileIndex(lambda kind: {"m/0": 16, "m/1": 1024}[kind])
    for number in range(100):
        index.add(f"m/0/00/{number}.kv", 1000)
        index.spend([f"m/0/00/{number}.kv"])
        index.pop_cheapest()
    index.add("m/1/00/0.kv", 1000)
    index.add("m/0/00/x.kv", 1000)
    assert cheapest(index, 1) == ["m/0/00/x.kv"]


def test_a_prefix_is_retained_on_the_disk_in_the_background(tmp_path: Path) -> None:
    size = ROW_BYTES + HEADER_BYTES
    files = open_files(tmp_path, max_bytes=10 * size, retained_share=0.5)
    files.add(Kept(0, DIGESTS[0], SALT))
    wait_for(lambda: files.has(0, DIGESTS[0]))
    files.retain("a", 1.0, DIGESTS[:1], time.monotonic() + 600.0)
    wait_for(lambda: len(files._index._retention) == 1)
    for digest in DIGESTS[1:30]:
        files.add(Kept(0, digest, SALT))
        wait_for(lambda digest=digest: files.has(0, digest))  # type: ignore[misc]
    assert files.has(0, DIGESTS[0])
    files.spend(DIGESTS[:1])
    wait_for(lambda: not files._index._retention)
    files.add(Kept(0, b"x" * 32, SALT))
    wait_for(lambda: not files.has(0, DIGESTS[0]))
