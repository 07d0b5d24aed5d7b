"""What the dispatcher counts of answers: those that one worker computed, as they were delivered."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.dispatch.dispatcher import DispatchCounts
from gateway.dispatch.inflight import Flight
from gateway.dispatch.sinks import ScoredSink
from gateway.metrics import GatewayMetrics
from gateway.telemetry.answer_counts import LENGTH_BOUNDS, LOGPROB_BOUNDS, AnswerRow
from shared.messages import Delta, Finish, Request, TokenLogprob, Usage
from tests.gateway.dispatch_bench import Bench, ListSink


def _scores(*logprobs: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(1, "x", b"x", each) for each in logprobs)


def rows(metrics: GatewayMetrics) -> list[AnswerRow]:
    return [row for document in metrics.answers.documents() for row in document.rows]


async def test_answer_is_counted_for_its_worker_and_revision(bench: Bench) -> None:
    worker, sink, request = await bench.begun(8)
    await worker.end(request, 8)
    await sink.end()
    (row,) = rows(bench.dispatcher.counts.metrics)
    assert (row.model, row.worker, row.lengths[LENGTH_BOUNDS.index(8)], row.endings) == (
        request.model, worker.name, 1, [0, 0, 1],
    )  # fmt: skip
    assert (sum(row.lengths), sum(row.logprobs)) == (1, 0)


async def test_length_is_that_of_what_came_and_log_probabilities_are_within_bounds() -> None:
    metrics, sink = GatewayMetrics(), ScoredSink(ListSink())
    counts = DispatchCounts(metrics)
    flight = Flight(Request(id="i", model="m", text="x", tenant="t"), sink, 1, 0.0, worker="w", emitted=[1, 2, 3])
    sink.deliver(Delta("i", 0, 0, (1,), logprobs=_scores(-0.2)))
    last = Delta("i", 0, 1, (2, 3), finish=Finish("stop", Usage(1, 999, 0), stop="END"), logprobs=_scores(-0.2, -0.8))
    counts.answered(flight, last, "r1")
    (row,) = rows(metrics)
    assert (row.revision, row.lengths[LENGTH_BOUNDS.index(3)], row.endings) == ("r1", 1, [0, 1, 0])
    assert row.logprobs[LOGPROB_BOUNDS.index(0.4)] == 1
    for value in (float("nan"), float("-inf"), 5.0):
        flight.sink = ScoredSink(ListSink())
        counts.answered(flight, replace(last, logprobs=_scores(value)), "r1")
    assert (row.logprobs[-1], row.logprobs[0]) == (2, 1)
    flight.start = 2
    counts.answered(flight, last, "r1")
    assert sum(row.lengths) == 4
