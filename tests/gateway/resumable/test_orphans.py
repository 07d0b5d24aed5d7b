"""Which streams a gateway goes on with when it looks for those that have lost theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from gateway.errors import ApiError
from gateway.resumable.log import Stored
from gateway.resumable.orphans import Orphans
from gateway.resumable.record import StreamHead
from tests.gateway.resumable.test_writer import head_and_generation


def head(stream_id: str, owner: str, **fields: Any) -> StreamHead:
    return msgspec.structs.replace(head_and_generation()[0], id=stream_id, owner=owner, **fields)


class Case:
    """A log with streams of a dead and of a live owner."""

    def __init__(self) -> None:
        heads = [
            head("lost", "dead"),
            head("gone", "dead"),
            head("kept", "alive"),
            head("over", "dead", ended=1.0),
            head("cut", "dead", is_cut=True),
        ]
        self.heads = {each.id: each for each in heads}
        self.adopted: list[str] = []
        self.failure: Exception | None = None
        calls = SimpleNamespace(is_dead=self._is_dead)
        self.orphans = Orphans(cast("Any", self), cast("Any", calls), cast("Any", None), self._adopt)

    async def running(self) -> list[tuple[str, str]]:
        if self.failure is not None:
            raise self.failure
        # One has ended, and was forgotten, since the list was made.
        return [("t", stream_id) for stream_id in [*self.heads, "forgotten"]]

    async def find(self, tenant: str, stream_id: str) -> Stored | None:
        found = self.heads.get(stream_id)
        return None if found is None else Stored(found, 1)

    async def _is_dead(self, owner: str) -> bool:
        return owner == "dead"

    async def _adopt(self, found: Stored) -> None:
        self.adopted.append(found.head.id)
        if found.head.id == "gone":
            raise ApiError(410, "gone", code="stream_expired")


async def test_streams_of_dead_owners_are_adopted() -> None:
    case = Case()
    assert await case.orphans.look()
    assert sorted(case.adopted) == ["gone", "lost"]


async def test_a_look_that_the_log_does_not_answer_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    case = Case()
    case.failure = NatsTimeoutError()
    assert not await case.orphans.look()
    assert "no look for streams" in caplog.text
