"""Stores what gateways count of answers, adds up all of it, and shows how workers differ.

Each process keeps its own counts of a day in `hr.response._answers.<day>.<process>` (stream `HR_RESPONSES`), so they
outlive it but for its last `INTERVAL_S`. Today's and yesterday's are read, older ones deleted. A document that is too
large, or of another format or day, is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from typing import Any

import msgspec
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.telemetry.answer_counts import FORMAT, MEASURES, AnswerCounts, AnswerRow, DayCounts
from gateway.telemetry.drift import MAX_WORKERS, Finding, compare, merged
from gateway.telemetry.row import MetricRow, add
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE
from shared.nats_connection import SEND_ERRORS
from shared.streams import RESPONSES_STREAM
from shared.subjects import answers_subject
from shared.usage_ledger import day_of

INTERVAL_S = 30.0
FRESH_S = 5.0
MAX_DOCUMENT_BYTES = 512 << 10
MAX_DOCUMENTS = 256
"""Processes of one day that are read: living ones first."""
_DAY_S = 86400.0
# Days in which gateways may have been away, after which the stream has dropped documents by their age.
_SWEPT_DAYS = 8
DRIFT_ROW = MetricRow(
    "headrace_worker_drift",
    "gauge",
    ("model", "worker", "compared_with", "measure"),
    "How much the answers of a worker differ today from those of the rest of its fleet (`fleet`), of other revisions "
    "or of yesterday, in `length`, `finish` or `logprob`: population stability index less what chance explains. Above "
    "0.25 they differ.",
)

_log = logging.getLogger(__name__)


class DriftWatch(Collector):
    """Keeps the counts of one process stored, and compares workers while this is wanted."""

    def __init__(
        self,
        js: JetStreamContext,
        process: str,
        counts: AnswerCounts,
        is_wanted: Callable[[], bool],
        live: Callable[[], set[str]],
        processes: Callable[[], Set[str]] = frozenset,
    ) -> None:
        """Store the counts of `process`, a name that no other has.

        `is_wanted` tells whether this process shows the fleet to Prometheus; `live` returns the names of workers that
        are shown, `processes` those of the other processes that live.
        """
        self._js = js
        self._process = process
        self._counts = counts
        self._is_wanted = is_wanted
        self._live = live
        self._processes = processes
        self._decode = msgspec.msgpack.Decoder(DayCounts).decode
        self._stored: dict[str, bytes] = {}
        self._swept = ""
        self._findings: list[Finding] = []
        self._made_at = float("-inf")
        self._is_making = asyncio.Lock()
        self._is_storing = asyncio.Lock()
        self._log_limit = LogLimit(_log)

    async def watch_forever(self) -> None:
        """Store and compare from time to time."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.store()
            if self._is_wanted():
                with suppress(*SEND_ERRORS):
                    await self.findings()
                    await self._sweep()

    async def store(self) -> None:
        """Store days whose counts have changed since the last time; retry the next time if NATS refuses them."""
        async with self._is_storing:
            try:
                for document in self._counts.documents():
                    data = msgspec.msgpack.encode(document)
                    if data != self._stored.get(document.day):
                        await self._js.publish(answers_subject(document.day, self._process), data)
                        self._stored[document.day] = data
            except SEND_ERRORS as error:
                self._log_limit.warning("answers", "counts of answers are not stored yet: %r", error)
                return
            today = self._counts.today
            self._counts.forget_days_before(today)
            self._stored = {day: data for day, data in self._stored.items() if day >= today}

    async def findings(self) -> list[Finding]:
        """Return the comparisons of live workers, at most `FRESH_S` old; `nats.errors.Error` if NATS is away."""
        async with self._is_making:
            if time.monotonic() - self._made_at >= FRESH_S:
                await self.store()
                now = self._counts.clock()
                days = [await self._read(day_of(now - ago)) for ago in (0.0, _DAY_S)]
                # In a thread: of a large fleet it takes a part of a second.
                self._findings = await asyncio.to_thread(_compare, *days)
                self._made_at = time.monotonic()
        live = self._live()
        return [each for each in self._findings if each.worker in live]

    async def view(self) -> list[dict[str, Any]]:
        """Return the comparisons for people; raises as `findings`."""
        return [
            {
                **{name: getattr(each, name) for name in ("model", "worker", "revision", "compared_with")},
                "psi": dict(zip(MEASURES, each.psi, strict=True)),
                **{name: getattr(each, name) for name in ("answers", "others", "verdict")},
            }
            for each in await self.findings()
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric: of a worker of two revisions, that with the most answers."""
        family = DRIFT_ROW.family()
        live = self._live() if self._is_wanted() else set()
        shown: dict[tuple[str, str, str], Finding] = {}
        for each in sorted(self._findings, key=lambda each: each.answers):
            if each.worker in live:
                shown[each.model, each.worker, each.compared_with] = each
        for labels, each in list(shown.items())[: 3 * MAX_WORKERS]:
            for measure, value in zip(MEASURES, each.psi, strict=True):
                if value is not None:
                    add(family, [*labels, measure], value)
        yield family

    async def _read(self, day: str) -> list[AnswerRow]:
        rows: list[AnswerRow] = []
        found = await self._js.stream_info(RESPONSES_STREAM, subjects_filter=answers_subject(day, "*"))
        living = {answers_subject(day, process) for process in (self._process, *self._processes())}
        subjects = sorted(found.state.subjects or (), key=lambda subject: subject not in living)
        for subject in subjects[:MAX_DOCUMENTS]:
            with suppress(NotFoundError, *UNDECODABLE):
                data = (await self._js.get_last_msg(RESPONSES_STREAM, subject)).data or b""
                if len(data) <= MAX_DOCUMENT_BYTES:
                    document = self._decode(data)
                    if (document.format, document.day) == (FORMAT, day):
                        rows += document.rows
        return rows

    async def _sweep(self) -> None:
        """Delete the days before yesterday, once a day."""
        if self._swept == self._counts.today:
            return
        for ago in range(2, _SWEPT_DAYS):
            day = day_of(self._counts.clock() - ago * _DAY_S)
            await self._js.purge_stream(RESPONSES_STREAM, subject=answers_subject(day, "*"))
        self._swept = self._counts.today


def _compare(today: list[AnswerRow], yesterday: list[AnswerRow]) -> list[Finding]:
    return compare(merged(today), merged(yesterday))
