"""Outcomes reach the loop in order, and the engine waits where the loop goes first, never for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine_thread import MAX_FIRST_EVENTS, MAX_WAITING_OUTCOMES, StepOutcome, StepRelay
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import wait_until


def _relay(
    handle: Callable[[StepOutcome], None] = lambda outcome: None, send: Callable[[], None] = lambda: None
) -> StepRelay:
    return StepRelay(asyncio.get_running_loop(), handle, send)


async def test_relay_keeps_order_and_holds_a_fast_engine_back() -> None:
    seen: list[int] = []
    relay = _relay(lambda outcome: seen.append(outcome.step))
    produced: list[int] = []

    def produce() -> None:
        for step in range(200):
            relay.deliver(StepOutcome(step, [], None))  # type: ignore[arg-type]
            produced.append(step)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join(0.1)  # the loop is stuck meanwhile
    assert len(produced) <= MAX_WAITING_OUTCOMES + 1
    await wait_until(lambda: len(seen) == 200)
    assert seen == produced == list(range(200))


def _outcome(*positions: int) -> StepOutcome:
    """Return a step that gave a token to a sequence at each of these positions."""
    sequence = Sequence("s", [1], 1, Sampling(), max_tokens=9)
    return StepOutcome(1, [SequenceEvent(sequence, (7,), position) for position in positions], None)  # type: ignore[arg-type]


async def test_engine_goes_on_when_the_first_token_of_an_answer_has_been_sent() -> None:
    done: list[str] = []
    relay = _relay(lambda outcome: done.append("handled"), lambda: done.append("sent"))
    relay._has_room = _Patient(done)

    await asyncio.to_thread(relay.deliver, _outcome(0, 5))
    assert done == ["handled", "sent", "engine goes on"]


@pytest.mark.parametrize("positions", [(), (1,), (5, 9), (0,) * (MAX_FIRST_EVENTS + 1)])
async def test_engine_does_not_wait_for_what_follows_a_first_token_nor_for_many_at_once(
    positions: tuple[int, ...],
) -> None:
    relay = _relay()
    done: list[str] = []
    relay._has_room = _Patient(done)
    await asyncio.to_thread(relay.deliver, _outcome(*positions))
    assert done == []


async def test_engine_waits_for_a_stuck_loop_only_for_a_moment() -> None:
    relay = _relay()
    relay.deliver(_outcome(0))  # called by the loop itself, so that nobody takes it


class _Patient(threading.Event):
    """An event whose waits end only when it is set, and are noted then."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout < 0.1
        is_set = super().wait(10)
        self._done.append("engine goes on")
        return is_set


def test_outcome_is_there_when_the_loop_is_called() -> None:
    seen: list[int] = []
    loop = SimpleNamespace(call_soon_threadsafe=lambda take: take())
    relay = StepRelay(loop, lambda outcome: seen.append(outcome.step), lambda: None)  # type: ignore[arg-type]
    relay.deliver(StepOutcome(3, [], None))  # type: ignore[arg-type]
    assert seen == [3]
