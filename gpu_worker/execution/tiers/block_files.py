"""The tier of files: writes contents from the host's memory, reads and verifies them, and keeps within its bytes.

The engine waits for nothing here. Writers have a bounded queue, and drop contents when it is full. A disk that is full,
fails or hangs costs hits: after a write error nothing is written for a while, and after a read that hangs, or an error
that is not of one file alone, the tier has nothing for a while.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Values
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, Full, Queue

import numpy as np

from gpu_worker.execution.memory.block_bytes import BlockBytes, Bytes
from gpu_worker.execution.tiers.file_format import HEADER_BYTES, KEY, Maker
from gpu_worker.execution.tiers.file_index import FileIndex
from gpu_worker.execution.tiers.file_store import FileStore
from gpu_worker.execution.tiers.host_tier import HostTier, Kept
from shared.log_limit import LogLimit
from shared.worker_metrics import KvTierReading

_log = logging.getLogger(__name__)

_MAX_WAITING = 65_536
_NUM_WRITERS = 4
SUSPENDED_S = 30.0
WRITE_PAUSE_S = 10.0
_MAX_PAUSE_S = 60.0
OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.EIO)
"""Failed reads in a row that disable the tier: fewer may be a bad sector, or a file of another user."""
_MAX_FAILED_READS = 8
_OTHER_TOKENS = 16
_OWN_SHARE = 0.5  # Of all bytes: files that cannot be deleted never take these from the others.


class BlockFiles:
    """The tier behind the host's memory. Only `read` waits for a disk; any thread may call it.

    `tokens` says, by group, how many tokens are computed to have a content again; `make_maker` reads all weights, in a
    thread.

    Attributes:
        is_ready: Set when files can be used: the weights' digest is known, and what there is.
    """

    def __init__(
        self,
        store: FileStore,
        groups: Values[BlockBytes],
        tokens: Values[int],
        max_bytes: int,
        rows: HostTier,
        make_maker: Callable[[], Maker],
        retained_share: float = 0.0,
    ) -> None:
        self.name = store.name
        self.is_ready = threading.Event()
        self._store = store
        self._groups = groups
        self._max_bytes = max_bytes
        self._rows = rows
        self._make_maker = make_maker
        self._tokens = tokens
        self._maker = Maker(b"", ())
        self._index = FileIndex(self._tokens_of, max_bytes * retained_share)
        # None ends a writer.
        self._to_write: Queue[Kept | None] = Queue(_MAX_WAITING)
        self._to_do: Queue[Callable[[], None]] = Queue(_MAX_WAITING)
        self._suspended_until = self._paused_until = -1.0
        self._stamps: dict[str, int | None] = {}
        # What may be wrong: in the order in which it is deleted, and all of it, to be found no more.
        self._to_delete: deque[bytes] = deque()
        self._forgetting: set[bytes] = set()
        # Files that could not be deleted, with their bytes: they count, and are found no more.
        self._undeleted: dict[str, int] = {}
        # Keys of the files that a thread is writing or deleting.
        self._claims: set[str] = set()
        self._claim_lock = threading.Lock()
        self._num_failed_reads = 0
        self._is_closed = threading.Event()
        self._log_limit, self._log_lock = LogLimit(_log), threading.Lock()
        self.stored_bytes = self.num_dropped = self.num_evicted = self.num_refused = self.num_failed = 0
        self._threads = [threading.Thread(target=self._watch, name="kv-files", daemon=True)]
        for number in range(_NUM_WRITERS):
            self._threads.append(threading.Thread(target=self._write_all, name=f"kv-write-{number}", daemon=True))
        for thread in self._threads:
            thread.start()

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content is likely to be there, and can be read now."""
        if not self.is_ready.is_set() or self.is_suspended:
            return False
        return digest not in self._forgetting and self._maker.key(group, digest) in self._index

    def read(self, group: int, digest: bytes, salt: bytes) -> Bytes | None:
        """Return a content that was verified, None where there is none; what fails is deleted."""
        key = self._maker.key(group, digest)
        if digest in self._forgetting:
            return None
        try:
            data = self._store.read(key, HEADER_BYTES + self._groups[group].row_bytes)
        except FileNotFoundError:
            self._index.remove(key)
            return None
        except OSError as error:
            self._read_failed(key, error)
            return None
        self._num_failed_reads = 0
        payload = self._maker.payload(data, group, digest, salt, self._groups[group].row_bytes)
        if payload is None:
            self.num_refused += 1
            text = "%s: %s is damaged, or not what its name says; such files are deleted"
            with self._log_lock:
                self._log_limit.warning("refused", text, self._store.place, key)
            self._delete(key)
            return None
        self._index.touch(key)
        return np.frombuffer(payload, dtype=np.uint8)

    def add(self, kept: Kept) -> None:
        """Write a content some time later, unless too many wait."""
        if time.monotonic() < self._paused_until:
            self.num_dropped += 1
            return
        try:
            self._to_write.put_nowait(kept)
        except Full:
            self.num_dropped += 1

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete contents, in all groups, some time later; they are not found from now on.

        A delete that fails is tried again until it succeeds, or this process ends.
        """
        digests = tuple(digests)
        self._forgetting.update(digests)
        self._to_delete.extend(digests)
        # If too much waits, they are deleted after the next look.
        with suppress(Full):
            self._to_do.put_nowait(self._delete_forgotten)

    def retain(self, tenant: str, weight: float, digests: Values[bytes], until: float) -> None:
        """Delete contents last, in all groups, until a time, as far as the tenant's quota goes."""
        with suppress(Full):
            self._to_do.put_nowait(partial(self._retain, tenant, weight, digests, until))

    def spend(self, digests: Values[bytes]) -> None:
        """Delete contents before others, in all groups."""
        with suppress(Full):
            self._to_do.put_nowait(partial(self._spend, digests))

    def drain(self, timeout_s: float) -> None:
        """Wait until all is written that is to be, or a time is over."""
        deadline = time.monotonic() + timeout_s
        while self._to_write.unfinished_tasks and time.monotonic() < deadline:
            if not self.is_ready.is_set() or time.monotonic() < self._paused_until:
                return
            time.sleep(0.01)

    def close(self, timeout_s: float) -> None:
        """Have nothing and write nothing any more; wait for the threads, one of which may hang, at most so long."""
        self._suspended_until = math.inf
        self._is_closed.set()
        self.is_ready.set()
        for _ in range(_NUM_WRITERS):
            with suppress(Full):
                self._to_write.put_nowait(None)
        with suppress(Full):
            self._to_do.put_nowait(lambda: None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def is_suspended(self) -> bool:
        """Whether it has nothing at present, because the disk has failed or hung."""
        return time.monotonic() < self._suspended_until

    def suspend(self) -> None:
        """Have nothing for a while."""
        self._suspended_until = max(self._suspended_until, time.monotonic() + SUSPENDED_S)

    def reading(self, hit_tokens: int, loaded_bytes: int) -> KvTierReading:
        """Return the counts."""
        return KvTierReading(
            self.name,
            used_bytes=self._num_bytes,
            total_bytes=self._max_bytes,
            hit_tokens=hit_tokens,
            stored_bytes=self.stored_bytes,
            loaded_bytes=loaded_bytes,
            dropped=self.num_dropped,
            evicted=self.num_evicted,
            refused=self.num_refused,
            failed=self.num_failed,
            retained_bytes=self._index.retained_bytes,
        )

    def _watch(self) -> None:
        try:
            self._maker = self._make_maker()
        except Exception:
            _log.exception("the weights cannot be read; %s is not used", self._store.place)
            return
        _log.info("KV blocks are kept in %s by the maker %s", self._store.place, self._maker.folder)
        wait_s = self._store.refresh_s
        while not self._is_closed.is_set():
            try:
                self._look()
                self.is_ready.set()
                wait_s = self._store.refresh_s
            except Exception as error:
                self._failed("listed", error)
                wait_s = min(2 * wait_s, _MAX_PAUSE_S)
            # This thread is the only one that looks and deletes: whatever fails, it goes on, and waits before it looks.
            self._try(self._delete_again)
            self._try(self._make_room)
            self._do_what_was_asked(wait_s)
        self._try(self._delete_forgotten)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._failed("kept in order", error)

    @property
    def _num_bytes(self) -> int:
        return self._index.num_bytes + sum(list(self._undeleted.values()))

    @property
    def _room(self) -> int:
        """Bytes of the files that can be deleted. Deleting them all would not make up for a huge one that cannot."""
        undeleted = self._num_bytes - self._index.num_bytes
        return max(self._max_bytes - undeleted, int(self._max_bytes * _OWN_SHARE))

    def _look(self) -> None:
        names = set()
        for name, stamp in self._store.folders():
            names.add(name)
            if stamp is None or self._stamps.get(name) != stamp:
                listed_at = time.monotonic()
                files = self._store.files(name)
                found = {key: file for key, file in files.items() if KEY.fullmatch(key) and key not in self._undeleted}
                self._index.renew(name, found, listed_at)
                self._stamps[name] = stamp
                # Others want the interpreter too.
                time.sleep(0)
        for gone in self._stamps.keys() - names:
            self._index.renew(gone, {}, time.monotonic())
            del self._stamps[gone]

    def _do_what_was_asked(self, wait_s: float) -> None:
        """Do what others have asked for, until it is time to look again."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0 and not self._is_closed.is_set():
            try:
                ask = self._to_do.get(timeout=left)
            except Empty:
                return
            self._try(ask)

    def _delete_again(self) -> None:
        """Repeat failed deletions until one fails again, and delete the forgotten contents."""
        for key in list(self._undeleted):
            if key in self._undeleted and not self._delete(key):
                # So it is with most of the others.
                break
        self._delete_forgotten()

    def _delete_forgotten(self) -> None:
        """Try to delete all that is to be forgotten, in the time between two looks."""
        until = time.monotonic() + self._store.refresh_s
        for _ in range(len(self._to_delete)):
            digest = self._to_delete.popleft()
            deleted = [self._delete(self._maker.key(group, digest)) for group in range(len(self._groups))]
            if all(deleted):
                self._forgetting.discard(digest)
            else:
                self._to_delete.append(digest)
            if time.monotonic() > until:
                break

    def _retain(self, tenant: str, weight: float, digests: Values[bytes], until: float) -> None:
        for group, contents in enumerate(self._groups):
            named = ((self._maker.key(group, digest), digest) for digest in digests)
            keys = [key for key, digest in named if key in self._index or self._rows.knows(group, digest)]
            self._index.retain(tenant, weight, keys, until, HEADER_BYTES + contents.row_bytes)

    def _spend(self, digests: Values[bytes]) -> None:
        for group in range(len(self._groups)):
            self._index.spend([self._maker.key(group, digest) for digest in digests])

    def _write_all(self) -> None:
        self.is_ready.wait()
        while (kept := self._to_write.get()) is not None and not self._is_closed.is_set():
            try:
                self._write(kept)
                self._make_room()
            except IsADirectoryError as error:
                # At the place of this content alone.
                self._failed("written", error)
            except Exception as error:
                self._failed("written", error)
                self._paused_until = time.monotonic() + WRITE_PAUSE_S
            finally:
                self._to_write.task_done()

    def _write(self, kept: Kept) -> None:
        key = self._maker.key(kept.group, kept.digest)
        if key in self._index or HEADER_BYTES + self._groups[kept.group].row_bytes > self._max_bytes:
            return
        with self._claimed(key) as is_free, self._rows.pinned(kept.group, kept.digest) as row:
            if row is None or not is_free:
                self.num_dropped += 1
                return
            payload = row.data
            header = self._maker.header(kept.group, kept.digest, kept.salt, payload)
            self._store.write(key, [header, payload])
            self._undeleted.pop(key, None)
            self._index.add(key, len(header) + row.nbytes)
            if not self._rows.is_current(kept.group, kept.digest, row):
                # It may be wrong, which was found meanwhile.
                self.forget([kept.digest])
        self.stored_bytes += len(header) + row.nbytes

    def _make_room(self) -> None:
        """Delete the cheapest files; where one cannot be deleted, nothing is written for a while."""
        while self._index.num_bytes > self._room and (cheapest := self._index.pop_cheapest()) is not None:
            key, num_bytes = cheapest
            if not self._delete(key, num_bytes):
                self._paused_until = time.monotonic() + WRITE_PAUSE_S
                return
            self.num_evicted += 1

    def _delete(self, key: str, num_bytes: int = 0) -> bool:
        """Delete a file; return whether it is gone. One that is being written stays.

        One that cannot be deleted counts as `num_bytes` if the index has not got it.
        """
        with self._claimed(key) as is_free:
            if not is_free:
                return False
            num_bytes = self._index.remove(key) or self._undeleted.pop(key, num_bytes)
            try:
                self._store.delete(key)
            except Exception as error:
                self._failed("deleted", error)
                if num_bytes:
                    # Behind the others, which are tried before it is tried again.
                    self._undeleted[key] = num_bytes
                return False
        return True

    @contextmanager
    def _claimed(self, key: str) -> Iterator[bool]:
        """Yield whether no other thread writes or deletes a file; if so, none does until the end.

        No thread waits for another: a store may hang.
        """
        with self._claim_lock:
            is_free = key not in self._claims
            self._claims.add(key)
        try:
            yield is_free
        finally:
            if is_free:
                with self._claim_lock:
                    self._claims.remove(key)

    def _tokens_of(self, kind: str) -> int:
        folder, _, group = kind.partition("/")
        is_own = folder == self._maker.folder and int(group) < len(self._tokens)
        return self._tokens[int(group)] if is_own else _OTHER_TOKENS

    def _read_failed(self, key: str, error: OSError) -> None:
        """Have nothing for a while, unless the error is of one file, which is looked for no more."""
        self._failed("read", error)
        self._num_failed_reads += 1
        if error.errno in OF_ONE_FILE and self._num_failed_reads < _MAX_FAILED_READS:
            self._index.remove(key)
        else:
            self._num_failed_reads = 0
            self.suspend()

    def _failed(self, what: str, error: Exception) -> None:
        with self._log_lock:
            self.num_failed += 1
            message = "%s cannot be %s (%s); the KV cache goes on without"
            self._log_limit.warning(what, message, self._store.place, what, error)
