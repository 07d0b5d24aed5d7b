"""The gateway in virtual time: the real shedder and forecast, on the load that heartbeats show, and its clients.

One gateway stands for all: it sees every request. A client that is refused comes back when `Retry-After` says so, with
the same body and its ticket, as official libraries do, and gives up after `max_retries`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from gateway.admission.caller import TICKET_HEADER, Caller
from gateway.admission.shedding import Prediction, Shedder
from gateway.config import GatewayConfig
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.errors import ApiError, whole_seconds
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from gpu_worker.consumer.heartbeat import INTERVAL_S as HEARTBEAT_S
from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.fleet import VirtualFleet
from ops.simulation.outcome import Job, Moment, Outcome
from ops.simulation.workload import Arrival
from shared.messages import Request
from shared.sampling import Sampling

MODEL = "simulated"
_RETRIES = b"x-stainless-retry-count"


class ServedJob(Job):
    """A request that was admitted, and its client."""

    __slots__ = ("_gateway", "client", "flight", "prediction")

    def __init__(self, gateway: VirtualGateway, client: Client, prediction: Prediction | None, flight: Flight) -> None:
        super().__init__(flight.request)
        self._gateway = gateway
        self.client = client
        self.prediction = prediction
        self.flight = flight

    def note_claim(self, worker: str) -> None:
        """Tell the gateway which worker has it."""
        self._gateway.flights.claim(self.flight, worker)

    def note_loss(self) -> None:
        """Tell the gateway that its worker is lost."""
        super().note_loss()
        self._gateway.flights.release(self.flight)

    def note_first(self, first_s: float, num_prompt: int, num_cached: int) -> None:
        """Tell the gateway of the first token."""
        super().note_first(first_s, num_prompt, num_cached)
        self._gateway.flights.note_output(self.flight)

    def note_end(self, token_ids: list[int]) -> None:
        """Tell the gateway of the end."""
        self.is_done = True
        self._gateway.end(self, len(token_ids))


@dataclass(slots=True)
class Client:
    """Sends one request until it is served."""

    arrival: Arrival
    number: int
    since: float
    num_attempts: int = 0
    ticket: bytes | None = None

    def caller(self) -> Caller:
        """Return who asks."""
        headers = [(_RETRIES, b"%d" % self.num_attempts)]
        if self.ticket is not None:
            headers.append((TICKET_HEADER, self.ticket))
        return Caller(self.arrival.tenant, self.arrival.tenant, headers, b"%d" % self.number)


class Progress(NamedTuple):
    """How many requests have ended, served or not, and the virtual time in seconds."""

    num_ended: int
    at: float


class VirtualGateway:
    """Owns the clients, the gateway's state of requests, and their counts.

    Attributes:
        outcome: What clients saw, and the fleet at each heartbeat.
    """

    def __init__(
        self,
        fleet: VirtualFleet,
        config: SchedulerConfig,
        *,
        ttft_slo_s: float,
        latency_s: float = 0.0,
        max_retries: int = 0,
        seed: int = 0,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        """Serve by a fleet; `seed` is of the jitter of retry times, and `report` is called with each heartbeat."""
        self.fleet = fleet
        self.flights = FlightTable()
        self.outcome = Outcome()
        self._config = config
        self._latency_s = latency_s
        self._max_retries = max_retries
        self._report = report
        self._generator = random.Random(f"gateway/{seed}")
        settings = GatewayConfig(interactive_ttft_slo_s=ttft_slo_s)
        self._shedder = Shedder(settings, GatewayMetrics(), self._generator.random, fleet.clock.time)
        self._arrivals: Iterator[Arrival] = iter(())
        self._num_waiting = self._num_arrived = 0
        self._has_more = False
        self._load: FleetLoad | None = None

    def serve(self, arrivals: Iterator[Arrival]) -> None:
        """Serve requests until the last one has ended."""
        self._arrivals = arrivals
        self._beat()
        self._expect()
        self.fleet.clock.run(lambda: not self._has_more and (not self._num_waiting or self._is_over))
        self.outcome.num_unserved = self._num_waiting

    @property
    def _is_over(self) -> bool:
        return not any(worker.is_alive for worker in self.fleet.workers)

    def end(self, job: ServedJob, num_tokens: int) -> None:
        """Count a request that is complete."""
        served, client, latency_s = self.outcome, job.client, self._latency_s
        self.flights.remove(job.flight)
        assert job.first_s is not None
        first_at = job.sent_at + job.first_s + latency_s / 2
        served.ttfts_s.append(first_at - client.since)
        served.ends_s.append(self.fleet.now + latency_s / 2 - client.since)
        served.num_prompt_tokens += job.num_prompt
        served.num_cached_tokens += job.num_cached
        served.num_output_tokens += num_tokens
        served.num_moves += job.num_moves
        served.num_retried += client.num_attempts > 1
        served.duration_s = self.fleet.now
        if job.prediction is not None:
            self._shedder.observe(job.prediction, job.first_s + latency_s, job.num_prompt, num_tokens)
        self._num_waiting -= 1

    def _expect(self) -> None:
        arrival = next(self._arrivals, None)
        self._has_more = arrival is not None
        if arrival is not None:
            self.fleet.clock.call_at(arrival.at, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._num_arrived += 1
        if arrival.prompt < self._config.max_num_tokens:
            self._num_waiting += 1
            self._ask(Client(arrival, self._num_arrived, self.fleet.now))
        else:
            self.outcome.num_too_long += 1
        self._expect()

    def _ask(self, client: Client) -> None:
        arrival = client.arrival
        sampling = Sampling(max_tokens=arrival.output, ignore_eos=True)
        prompt = Prompt(arrival.prompt, token_ids=())
        generation = Generation("completion", MODEL, (prompt,), 1, sampling, deterministic=False)
        load, tenant = self.present_load, arrival.tenant
        share, num_own = self.flights.share(load, tenant), self.flights.num_of(MODEL, tenant)
        try:
            prediction = self._shedder.admit(load, generation, client.caller(), share, num_own)
        except ApiError as error:
            self._refuse(client, error)
            return
        client.num_attempts += 1
        self._publish(client, prediction, sampling)

    def _publish(self, client: Client, prediction: Prediction, sampling: Sampling) -> None:
        arrival = client.arrival
        request = Request(
            id=f"r{client.number}",
            model=MODEL,
            tenant=arrival.tenant,
            token_ids=tuple(arrival.token_ids(client.number)),
            sampling=sampling,
            cache_hints=arrival.hints,
        )
        flight = Flight(request, cast("Any", None), arrival.prompt, self.fleet.now)
        self.flights.add(flight)
        job = ServedJob(self, client, prediction, flight)
        self.fleet.clock.call_later(self._latency_s / 2, lambda: self.fleet.submit(job))

    def _refuse(self, client: Client, error: ApiError) -> None:
        self.outcome.num_refusals += 1
        client.num_attempts += 1
        if client.num_attempts > self._max_retries or error.retry_after_s is None:
            self.outcome.num_given_up += 1
            self._num_waiting -= 1
            return
        ticket = error.headers.get(TICKET_HEADER.decode())
        client.ticket = ticket.encode() if ticket else client.ticket
        self.fleet.clock.call_later(whole_seconds(error.retry_after_s), lambda: self._ask(client))

    @property
    def present_load(self) -> FleetLoad:
        """Return the load of the last heartbeats, plus changes that they do not show yet."""
        load = self._load
        assert load is not None
        requests, tokens = self.flights.unshown(MODEL)
        if not requests:
            return load
        requests, tokens = load.queued_requests + requests, load.queued_tokens + tokens
        return replace(load, queued_requests=requests, queued_tokens=tokens)

    def _beat(self) -> None:
        """Take in the heartbeats of all workers, now and from now on."""
        alive = [worker for worker in self.fleet.workers if worker.is_alive]
        for worker in alive:
            self.flights.note_heartbeat(MODEL, worker.name)
        loads = [worker.engine.stats for worker in alive]
        config, running = self._config, sum(load.running for load in loads)
        waiting, waiting_tokens = sum(load.waiting for load in loads), sum(load.waiting_tokens for load in loads)
        most_requests, most_tokens = self.flights.awaited().get(MODEL, (0, 0))
        free = sum(load.free_blocks for load in loads)
        total = config.num_blocks * len(alive)
        self._load = FleetLoad(
            model=MODEL,
            num_workers=len(alive),
            running=running,
            queued_requests=min(waiting, most_requests),
            queued_tokens=min(waiting_tokens, most_tokens),
            prefill_rate=sum(load.prefill_rate for load in loads),
            decode_rate=sum(load.decode_rate for load in loads),
            free_blocks=free,
            total_blocks=total,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            longest_model_len=config.max_model_len,
            free_slots=sum(max(0, config.max_num_seqs - load.running) for load in loads),
        )
        self._record(len(alive), running, waiting, 1 - free / total if total else 0.0)
        self.fleet.clock.call_later(HEARTBEAT_S, self._beat)

    def _record(self, num_workers: int, running: int, waiting: int, kv_share: float) -> None:
        workers = self.fleet.workers
        device_s = sum(worker.runner.device_s for worker in workers)
        num_tokens = sum(worker.num_tokens for worker in workers)
        queued = waiting + self.fleet.num_queued
        refusals = self.outcome.num_refusals
        moment = Moment(self.fleet.now, running, queued, kv_share, device_s, num_tokens, refusals, num_workers)
        self.outcome.moments.append(moment)
        if self._report is not None:
            self._report(Progress(self._num_arrived - self._num_waiting, self.fleet.now))
