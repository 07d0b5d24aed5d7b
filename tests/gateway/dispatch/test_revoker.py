"""What is sent to take requests back; NATS is in memory."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from gateway.dispatch.revoker import Revoker
from shared.messages import Cancel


async def test_requests_that_may_be_cancelled_again_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.revoker.MAX_REMEMBERED", 2)
    sent: list[bytes] = []

    async def publish(subject: str, payload: bytes) -> None:
        sent.append(payload)

    revoker = Revoker(SimpleNamespace(publish=publish), None)  # type: ignore[arg-type]
    for name in "abc":
        revoker.cancel("m", name, 0)
    await revoker.close()
    sent.clear()
    for name in "abc":
        revoker.cancel_again(name, 0)
    await revoker.close()
    assert [msgspec.msgpack.decode(payload, type=Cancel).ids for payload in sent] == [("b", "c")]


class Sent:
    """A revoker, and what it sent: subject, ids, epoch, and who is left alone."""

    def __init__(self) -> None:
        self.cancels: list[tuple[str, tuple[str, ...], int, str | None]] = []
        self.deleted: list[tuple[str, int]] = []
        self.is_away = False
        js = SimpleNamespace(delete_msg=self._delete)
        self.revoker = Revoker(SimpleNamespace(publish=self._publish), js)  # type: ignore[arg-type]

    async def _publish(self, subject: str, payload: bytes) -> None:
        cancel = msgspec.msgpack.decode(payload, type=Cancel)
        self.cancels.append((subject, cancel.ids, cancel.epoch, cancel.keep))
        if self.is_away:
            raise OSError

    async def _delete(self, stream: str, seq: int) -> None:
        self.deleted.append((stream, seq))
        if self.is_away:
            raise OSError


async def test_cancellations_of_one_moment_leave_as_one_message_for_each_kind() -> None:
    sent = Sent()
    for name in ("a", "b"):
        sent.revoker.cancel("m", name, 1)
    sent.revoker.cancel("m", "c", 2)
    sent.revoker.cancel("n", "d", 1)
    sent.revoker.cancel("m", "e", 1, keep="w")
    assert sent.cancels == []
    await sent.revoker.close()
    assert sent.cancels == [
        ("hr.cancel.m", ("a", "b"), 1, None),
        ("hr.cancel.m", ("c",), 2, None),
        ("hr.cancel.n", ("d",), 1, None),
        ("hr.cancel.m", ("e",), 1, "w"),
    ]
    sent.revoker.cancel("m", "g", 1)
    await sent.revoker.close()
    assert sent.cancels[4:] == [("hr.cancel.m", ("g",), 1, None)]


async def test_many_cancellations_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.revoker.MAX_IDS_PER_CANCEL", 2)
    sent = Sent()
    for name in "abcde":
        sent.revoker.cancel("m", name, 1)
    await sent.revoker.close()
    assert [ids for _, ids, _, _ in sent.cancels] == [("a", "b"), ("c", "d"), ("e",)]


async def test_request_that_has_ended_is_cancelled_again_but_not_where_another_gateway_goes_on_with_it() -> None:
    sent = Sent()
    sent.revoker.cancel("m", "a", 1, keep="w")
    await sent.revoker.close()
    sent.revoker.cancel_again("a", 1)
    sent.revoker.cancel_again("unknown", 1)
    await sent.revoker.close()
    assert sent.cancels[1:] == [("hr.cancel.m", ("a",), 1, None)]


async def test_what_cannot_be_sent_keeps_nothing_else_back(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    sent.is_away = True
    for model in ("m", "n"):
        sent.revoker.cancel(model, "a", 1)
    for seq in (5, 6):
        sent.revoker.delete(seq)
    await sent.revoker.close()
    assert [subject for subject, *_ in sent.cancels] == ["hr.cancel.m", "hr.cancel.n"]
    assert sent.deleted == [("HR_INTERACTIVE", 5), ("HR_INTERACTIVE", 6)]
    assert "1 requests could not be cancelled" in caplog.text
    assert "failed" not in caplog.text
