"""A fleet and its clients under a fake clock, around the real shedder: who is admitted of those who return as told.

The fleet runs `NUM_SLOTS` sequences at a time, of random lengths. The shedder sees it as a gateway does: through a
heartbeat now and then, and what it has admitted since. The fleet may become slower or faster, and the rate that it
reports may be wrong.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission.caller import Caller
from gateway.admission.shedding import Prediction, Shedder
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.fleet.liveness import FleetLimits
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.sampling import Sampling

HEARTBEAT_S = FleetLimits().heartbeat_s
NUM_SLOTS = 16
STEP_S = 0.02
MEAN_TOKENS = 50
CAPACITY = NUM_SLOTS / (STEP_S * MEAN_TOKENS)
SLO_S = 10.0
GENERATION = Generation("completion", "m", (Prompt(estimated_tokens=10, text="x"),), 1, Sampling(), False)


@dataclass
class Report:
    """What became of returns, by whether a place was kept and by the told time: [admitted, returned]."""

    returns: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    first_tokens_s: list[float] = field(default_factory=list)
    # Of those who were admitted when they returned to a place: what they had been told, and their time to first token.
    kept_s: list[tuple[float, float]] = field(default_factory=list)
    num_served: int = 0
    busy_s: float = 0.0
    loaded_s: float = 0.0
    refused_of_tenant: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def utilization(self) -> float:
        """Share of the slots that ran once clients were refused, while newcomers kept arriving."""
        return self.busy_s / max(1e-9, self.loaded_s)

    def share(self, place: str, told: str) -> float:
        """Return the share admitted of those who returned when told."""
        admitted, returned = self.returns[(place, told)]
        return admitted / returned if returned else 1.0


def told_bin(seconds: float) -> str:
    return "<20" if seconds < 20 else "20-40" if seconds <= 40 else ">40"


class Simulation:
    """One run.

    `arrivals` gives a tenant's rate of newcomers at a time, and is asked once per 0.1 s. `speed` gives the fleet's at a
    time, 1 being the usual; it reports `reported` times the usual rate, as much as it does unless given.
    """

    def __init__(
        self,
        seed: int,
        arrivals: Callable[[float], dict[str, float]],
        return_share: float = 1.0,
        decode_error: float = 1.0,
        same_body: bool = False,
        speed: Callable[[float], float] = lambda now: 1.0,
        reported: Callable[[float], float] | None = None,
    ) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.report = Report()
        self.metrics = GatewayMetrics()
        config = GatewayConfig(interactive_ttft_slo_s=SLO_S)
        self.shedder = Shedder(config, self.metrics, self.chance.random, lambda: self.now)
        self._arrivals = arrivals
        self._return_share = return_share
        self._speed = speed
        self._reported = reported or (lambda now: decode_error * speed(now))
        self._same_body = same_body
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._queue: deque[tuple[float, float | None, Prediction]] = deque()
        self._num_running = 0
        self._duration_s = 0.0
        self._seen = (0, 0)
        self._admitted_since = 0

    def run(self, duration_s: float) -> Report:
        """Run until nothing happens any more; newcomers arrive for `duration_s`."""
        self._duration_s = duration_s
        tenths = int(duration_s * 10)
        for tenth in range(tenths):
            self._at(tenth / 10, self._newcomers)
        self._at(0.0, self._heartbeat)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.report

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _newcomers(self) -> None:
        for tenant, rate in self._arrivals(self.now).items():
            expected = rate * 0.1
            number = int(expected) + (self.chance.random() < expected % 1)
            for _ in range(number):
                body = b"same" if self._same_body else b"%d" % next(self._numbers)
                caller = Caller(tenant, tenant, [], body)
                self._at(self.now + self.chance.random() * 0.1, lambda caller=caller: self._ask(caller, None))

    def _heartbeat(self) -> None:
        self._seen = (self._num_running, len(self._queue))
        self._admitted_since = 0
        if self._events:
            self._at(self.now + HEARTBEAT_S, self._heartbeat)
        if self.now < self._duration_s and self.metrics.shed:
            self.report.loaded_s += HEARTBEAT_S * NUM_SLOTS
            self.report.busy_s += HEARTBEAT_S * self._num_running

    def _load(self) -> FleetLoad:
        running, waiting = self._seen
        return FleetLoad(
            model="m",
            num_workers=1,
            running=running,
            queued_requests=waiting + self._admitted_since,
            queued_tokens=(waiting + self._admitted_since) * 10,
            prefill_rate=1e5,
            decode_rate=NUM_SLOTS / STEP_S * self._reported(self.now),
            free_blocks=10_000,
            total_blocks=10_000,
            block_size=16,
            max_model_len=4096,
            free_slots=NUM_SLOTS - running,
        )

    def _ask(self, caller: Caller, told: tuple[str, float] | None) -> None:
        try:
            prediction = self.shedder.admit(self._load(), GENERATION, caller)
        except ApiError as error:
            self._note(told, is_admitted=False)
            # As the header says it: whole seconds.
            wait_s = int(dict(error.response_headers())[b"retry-after"])
            place = error.headers.get("x-headrace-place", "none")
            self.report.refused_of_tenant[caller.tenant].append(wait_s)
            if self.chance.random() < self._return_share:
                at = self.now + wait_s + self.chance.uniform(0.001, 0.1)
                self._at(at, lambda: self._ask(caller, (place, wait_s)))
            return
        self._note(told, is_admitted=True)
        self._admitted_since += 1
        told_s = told[1] if told is not None and told[0] == "booked" else None
        self._queue.append((self.now, told_s, prediction))
        self._fill()

    def _note(self, told: tuple[str, float] | None, is_admitted: bool) -> None:
        if told is not None:
            counts = self.report.returns[(told[0], told_bin(told[1]))]
            counts[0] += is_admitted
            counts[1] += 1

    def _fill(self) -> None:
        while self._queue and self._num_running < NUM_SLOTS:
            asked_at, told_s, prediction = self._queue.popleft()
            waited_s = self.now - asked_at
            self.report.first_tokens_s.append(waited_s)
            if told_s is not None:
                self.report.kept_s.append((told_s, waited_s))
            tokens = max(1, round(self.chance.expovariate(1 / MEAN_TOKENS)))
            step_s = STEP_S / self._speed(self.now)
            self._num_running += 1
            self._at(
                self.now + tokens * step_s,
                lambda p=prediction, t=tokens, first=waited_s + step_s: self._finish(p, t, first),
            )

    def _finish(self, prediction: Prediction, tokens: int, ttft_s: float) -> None:
        self._num_running -= 1
        self.report.num_served += 1
        self.shedder.observe(prediction, ttft_s, 10, tokens)
        self._fill()
