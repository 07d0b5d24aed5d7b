"""All tiers below the device's memory, as the scheduler sees them: the host's memory, other workers', then files.

What becomes findable on the device is copied to the host's memory at once, and from there to files by other threads.
So nothing has to be copied when the device needs the block, and what a killed process had computed is in files. A load
takes each content from the nearest tier that has it. What other workers have is read by threads of that load alone: one
that sends nothing keeps no other load waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from gpu_worker.core.tiers import FULL, Wanted
from gpu_worker.execution.memory.block_bytes import BlockBytes, Bytes
from gpu_worker.execution.tiers.block_files import BlockFiles
from gpu_worker.execution.tiers.block_load import BlockLoad
from gpu_worker.execution.tiers.host_tier import Batch, HostTier
from gpu_worker.execution.tiers.transfer import Transfer
from shared.worker_metrics import KvTierReading

_log = logging.getLogger(__name__)

_PROBE_INTERVAL = 32
"""One in this many loads that would not pay is done all the same, to measure again."""

_RATE_MEMORY_BYTES = 256 << 20
_CLOSE_S = 1.0
_NUM_FILE_THREADS = 4
_NUM_PEER_THREADS = 4
"""Threads of one load."""
_HANG_S = 0.5
"""A read of a file that takes longer is why a load makes no progress."""


class _LoadMeter:
    """Bytes per second of one tier, averaged over recent loads; 0 while unknown."""

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self.tokens = 0
        self.loaded_bytes = 0

    @property
    def bytes_per_s(self) -> float:
        return self._num_bytes / self._seconds if self._seconds > 0 else 0.0

    def observe(self, num_bytes: int, seconds: float, num_tokens: int) -> None:
        keep = max(0.0, 1.0 - num_bytes / _RATE_MEMORY_BYTES)
        self._num_bytes = self._num_bytes * keep + num_bytes
        self._seconds = self._seconds * keep + seconds
        self.tokens += num_tokens
        self.loaded_bytes += num_bytes


class BlockTiers:
    """Does what `gpu_worker.core.tiers.KvTiers` says."""

    def __init__(
        self,
        groups: Values[BlockBytes],
        block_size: int,
        host: HostTier,
        files: BlockFiles | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self.prefill_rate = 0.0
        self.transfer = transfer
        self._peers = None if transfer is None else transfer.peers
        self._groups = groups
        self._block_size = block_size
        self._host = host
        self._files = files
        self._kept = (host,) if files is None else (host, files)
        self._pending: list[dict[bytes, tuple[int, bytes]]] = [{} for _ in groups]
        self._salts: dict[bytes, bytes] = {}
        self._num_not_paying = 0
        self._meters = {name: _LoadMeter() for name in ("host", "peer", "files")}
        self._lock = threading.Lock()
        # None ends a thread.
        self._loads: SimpleQueue[BlockLoad | None] = SimpleQueue()
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        # Contents that only files have. Their threads are others, since a disk may hang for as long as it likes.
        self._file_reads: SimpleQueue[tuple[BlockLoad, int, Wanted] | None] = SimpleQueue()
        # By thread, since when it has been reading a file.
        self._reading_since: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._settle_batches, name="kv-store", daemon=True),
            threading.Thread(target=self._load_all, name="kv-load", daemon=True),
        ]
        # Each reads from other workers for one load.
        self._peer_threads: set[threading.Thread] = set()
        for number in range(0 if files is None else _NUM_FILE_THREADS):
            self._threads.append(threading.Thread(target=self._read_files, name=f"kv-read-{number}", daemon=True))
        for thread in self._threads:
            thread.start()

    def readings(self) -> tuple[KvTierReading, ...]:
        """Return the counts of each tier."""
        host, meter = self._host, self._meters["host"]
        reading = KvTierReading(
            "host",
            used_bytes=host.used_bytes,
            total_bytes=host.num_bytes,
            hit_tokens=meter.tokens,
            stored_bytes=host.stored_bytes,
            loaded_bytes=meter.loaded_bytes,
            dropped=host.num_dropped,
            evicted=host.num_evicted,
            retained_bytes=host.retained_bytes,
        )
        readings = [reading]
        if self.transfer is not None:
            meter = self._meters["peer"]
            readings.append(self.transfer.reading(meter.tokens, meter.loaded_bytes))
        if self._files is not None:
            meter = self._meters["files"]
            readings.append(self._files.reading(meter.tokens, meter.loaded_bytes))
        return tuple(readings)

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content is likely to be there."""
        if not self._groups[group].row_bytes:
            return True
        return (
            self._host.has(group, digest)
            or (self._peers is not None and self._peers.has(group, digest))
            or (self._files is not None and self._files.has(group, digest))
        )

    def pays(self, wanted: Iterable[tuple[int, bytes]], num_tokens: int) -> bool:
        """Compare the measured times of loading and of computing."""
        if not self.prefill_rate:
            return True
        seconds = 0.0
        for group, digest in wanted:
            rate = self._meters[self._nearest(group, digest)].bytes_per_s
            seconds += self._groups[group].row_bytes / rate if rate else 0.0
        if seconds < num_tokens / self.prefill_rate:
            return True
        self._num_not_paying += 1
        return self._num_not_paying % _PROBE_INTERVAL == 0

    def load(self, salt: bytes, wanted: list[Wanted]) -> BlockLoad:
        """Begin to load contents onto the device, after the copies of the contents that they overwrite."""
        self.flush()
        load = BlockLoad(salt, wanted, [group.mark() for group in self._groups])
        self._loads.put(load)
        return load

    def store(self, group: int, block: int, digest: bytes, salt: bytes) -> None:
        """Copy a block to the host's memory with the next `flush`."""
        if group == FULL:
            self._salts[digest] = salt
        if self._groups[group].row_bytes > 0 and not self._host.knows(group, digest):
            self._pending[group][digest] = (block, salt)

    def evicted(self, block: int, digest: bytes) -> None:
        """Copy a block that is not kept any more."""
        salt = self._salts.pop(digest, None)
        if salt is not None and self._groups[FULL].row_bytes > 0 and not self._host.knows(FULL, digest):
            self._pending[FULL][digest] = (block, salt)

    def flush(self) -> None:
        """Copy the contents to keep."""
        for group, pending in enumerate(self._pending):
            if not pending:
                continue
            contents = [(block, digest, salt) for digest, (block, salt) in pending.items()]
            pending.clear()
            batch = self._host.keep(group, contents)
            if batch is not None and batch.copy.is_done():
                self._settle(batch)
            elif batch is not None:
                self._batches.put(batch)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop contents everywhere."""
        digests = list(digests)
        for pending in self._pending:
            for digest in digests:
                pending.pop(digest, None)
        for tier in self._kept:
            tier.forget(digests)

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        """Evict contents last, in all groups and tiers."""
        digests = list(digests)
        # So that the host's memory knows the contents published last.
        self.flush()
        for tier in self._kept:
            tier.retain(tenant, weight, digests, until)

    def spend(self, digests: Iterable[bytes]) -> None:
        """Evict contents before others, in all groups and tiers."""
        digests = list(digests)
        self.flush()
        for tier in self._kept:
            tier.spend(digests)

    def suspend(self) -> None:
        """Suspend what a load probably waits for: files if a read hangs, else other workers, else files."""
        if self._files is not None and not self._files.is_suspended and self._is_disk_hanging():
            self._files.suspend()
            return
        has_closed = self._peers is not None and self._peers.suspend()
        if self._files is not None and not has_closed:
            self._files.suspend()

    def drain(self, timeout_s: float) -> None:
        """Wait until files have all that they are to have, or a time is over; call it when the engine has stopped."""
        self.flush()
        if self._files is not None:
            self._files.drain(timeout_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Wait as `drain` does, then end all threads but those that hang. Nothing may be called afterwards."""
        self.drain(drain_s)
        self._batches.put(None)
        self._loads.put(None)
        for _ in range(_NUM_FILE_THREADS):
            self._file_reads.put(None)
        if self._files is not None:
            self._files.close(_CLOSE_S)
        deadline = time.monotonic() + _CLOSE_S
        for thread in (*self._threads, *filter(threading.Thread.is_alive, self._peer_threads)):
            thread.join(max(0.0, deadline - time.monotonic()))
        # After the loads: NIXL must not release memory into which one of them reads.
        if self.transfer is not None:
            self.transfer.close()

    def _nearest(self, group: int, digest: bytes) -> str:
        if self._host.knows(group, digest):
            return "host"
        return "peer" if self._peers is not None and self._peers.has(group, digest) else "files"

    def _settle(self, batch: Batch) -> None:
        landed = self._host.settle(batch)
        if self._files is not None:
            for kept in landed:
                self._files.add(kept)

    def _settle_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.copy.wait()
            self._settle(batch)

    def _is_disk_hanging(self) -> bool:
        now = time.monotonic()
        return any(now - since > _HANG_S for since in list(self._reading_since.values()))

    def _land(self, load: BlockLoad, number: int, wanted: Wanted, row: Bytes) -> bool:
        """Write a content to its block, unless the load has ended; return whether it was written."""
        group, digest, block = wanted

        def write() -> None:
            self._groups[group].write(block, row, load.marks[group])
            if group == FULL:
                # Before the engine's thread can know the block, and evict it.
                self._salts[digest] = load.salt

        return load.write(number, write)

    def _load_all(self) -> None:
        """Load what the host's memory has, one load after another, and leave the rest to threads for other tiers."""
        while (load := self._loads.get()) is not None:
            of_peers: deque[tuple[int, Wanted]] = deque()
            while (taken := load.take()) is not None:
                with _logged_failure():
                    if self._load_from_host(load, *taken):
                        pass
                    elif self._peers is not None and self._peers.has(*taken[1][:2]):
                        of_peers.append(taken)
                        continue
                    elif self._files is not None:
                        self._file_reads.put((load, *taken))
                        continue
                load.note_ended()
            if of_peers:
                thread = threading.Thread(target=self._read_peers, args=(load, of_peers), name="kv-peer", daemon=True)
                self._peer_threads.add(thread)
                with _logged_failure():
                    thread.start()

    def _load_from_host(self, load: BlockLoad, number: int, wanted: Wanted) -> bool:
        """Load a content from the host's memory; return whether it is there."""
        group, digest, _ = wanted
        started = time.monotonic()
        if not self._groups[group].row_bytes:
            load.write(number, lambda: None)
            return True
        with self._host.pinned(group, digest) as row:
            if row is not None and self._land(load, number, wanted, row):
                self._observe("host", group, started)
            return row is not None

    def _read_peers(self, load: BlockLoad, asked: deque[tuple[int, Wanted]]) -> None:
        """Read contents for one load from other workers, in several threads."""
        assert self._peers is not None
        names = [wanted[:2] for _, wanted in asked]
        self._peers.expect(names)
        helpers = [
            threading.Thread(target=self._read_from_peers, args=(load, asked), name="kv-peer", daemon=True)
            for _ in range(min(_NUM_PEER_THREADS, len(names)) - 1)
        ]
        with _logged_failure():
            for helper in helpers:
                helper.start()
        self._read_from_peers(load, asked)
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        with _logged_failure():
            self._peers.forget(names)
        self._peer_threads.discard(threading.current_thread())

    def _read_from_peers(self, load: BlockLoad, asked: deque[tuple[int, Wanted]]) -> None:
        with suppress(IndexError):
            while True:
                number, wanted = asked.popleft()
                with _logged_failure():
                    if not self._load_from_peer(load, number, wanted) and self._files is not None:
                        self._file_reads.put((load, number, wanted))
                        continue
                load.note_ended()

    def _load_from_peer(self, load: BlockLoad, number: int, wanted: Wanted) -> bool:
        """Load a content from another worker; return whether it came, or is not wanted any more."""
        group, digest, _ = wanted
        started = time.monotonic()
        received = None if load.has_ended or self._peers is None else self._peers.read(group, digest, load.salt)
        if received is not None and self._land(load, number, wanted, received):
            self._observe("peer", group, started, _NUM_PEER_THREADS)
        return received is not None or load.has_ended

    def _read_files(self) -> None:
        """Read one content after another from files, which may wait for a disk as long as it likes."""
        thread = threading.get_ident()
        while (asked := self._file_reads.get()) is not None:
            load = asked[0]
            self._reading_since[thread] = time.monotonic()
            with _logged_failure():
                self._load_file(*asked)
            del self._reading_since[thread]
            load.note_ended()

    def _load_file(self, load: BlockLoad, number: int, wanted: Wanted) -> None:
        group, digest, _ = wanted
        started = time.monotonic()
        if load.has_ended or self._files is None or (row := self._files.read(group, digest, load.salt)) is None:
            return
        if self._land(load, number, wanted, row):
            self._observe("files", group, started, _NUM_FILE_THREADS)

    def _observe(self, tier: str, group: int, started: float, num_threads: int = 1) -> None:
        """Count a content that has arrived, and the time that one of several threads took for it."""
        seconds = (time.monotonic() - started) / num_threads
        with self._lock:
            num_tokens = self._block_size if group == FULL else 0
            self._meters[tier].observe(self._groups[group].row_bytes, seconds, num_tokens)


@contextmanager
def _logged_failure() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a block could not be loaded from a lower tier; it is computed")
