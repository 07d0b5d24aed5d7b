"""The entries of one stream as its process keeps them.

Most entries are never read again once they were shown, and a struct takes four times the memory of its encoding. So
those of a stream that this process generates are kept as the journal has encoded them, and decoded when they are read.
"""

from __future__ import annotations

from gateway.resumable.record import Entry, decode_entries


class StreamEntries:
    """Base of a stream: those of the log, and behind `num_shown` those that it has not confirmed yet."""

    __slots__ = ("_num_packed", "_packed", "_recent", "num_shown")

    def __init__(self) -> None:
        self._packed: list[bytes | list[Entry]] = []
        self._num_packed = 0
        # Those behind the packed ones.
        self._recent: list[Entry] = []
        self.num_shown = 0

    @property
    def entries(self) -> list[Entry]:
        """All entries, decoded from now on; a caller may change the list."""
        if self._packed:
            unpacked: list[Entry] = []
            for each in self._packed:
                unpacked += decode_entries(each) if isinstance(each, bytes) else each
            self._packed, self._num_packed, self._recent = [], 0, unpacked + self._recent
        return self._recent

    @property
    def num_entries(self) -> int:
        """Number of all entries."""
        return self._num_packed + len(self._recent)

    def since(self, start: int) -> list[Entry]:
        """Return the entries from number `start` on, to be read at once. This runs once per round and stream."""
        skipped = start - self._num_packed
        if not skipped:
            return self._recent
        return self._recent[skipped:] if skipped > 0 else self.entries[start:]

    def _take(self, up_to: int, array: bytes | None, *, packs: bool) -> list[Entry]:
        """Count the entries before number `up_to` as shown, and return the new ones.

        Where one `packs`, they are kept as `array`, which has them encoded, if there is one.
        """
        recent, num_known = self._recent, self.num_shown - self._num_packed
        num_recent = up_to - self._num_packed
        new = recent if not num_known and num_recent == len(recent) else recent[num_known:num_recent]
        self.num_shown += len(new)
        if packs and new and not num_known:
            self._packed.append(array or new)
            self._num_packed += len(new)
            self._recent = recent[num_recent:]
        return new

    def _drop_all(self) -> None:
        self._packed, self._recent = [], []
        self._num_packed = self.num_shown = 0
