"""How many workers are needed, from what heartbeats say."""

from __future__ import annotations

import msgspec
import pytest

from gateway.admission.shedding import Shedder
from gateway.config import GatewayConfig
from gateway.fleet.fleet import MODEL_MEMORY_S, Fleet
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.liveness import FleetLimits
from gateway.fleet.worker_needs import SCALE_DOWN_AFTER_S, Models, Need, WorkerNeeds
from gateway.metrics import GatewayMetrics
from shared.messages import Heartbeat
from shared.worker_metrics import WorkerMetrics

IDLE = Heartbeat(
    worker="w0",
    model="m",
    step=1,
    running=0,
    waiting=0,
    waiting_tokens=0,
    free_blocks=1000,
    total_blocks=1000,
    block_size=16,
    max_model_len=4096,
    max_num_seqs=8,
    prefill_rate=1000.0,
    decode_rate=400.0,
    queue_pending=0,
    metrics=WorkerMetrics(),
)


def needs_of(fleet: Fleet) -> WorkerNeeds:
    shedder = Shedder(GatewayConfig(), GatewayMetrics())
    return WorkerNeeds(Models(fleet.models, fleet.workers, fleet.load, shedder.outlook), 10.0, 3600.0)


class Watched:
    """A fleet that is looked at once a second."""

    def __init__(self, num_queued: int = 0, num_tokens: int = 0) -> None:
        self.queued = (num_queued, num_tokens)
        self.fleet = Fleet("g", FleetLimits(), OwnRequests(lambda model: self.queued, dict))
        self.needs = needs_of(self.fleet)
        self.now = 0.0
        self.beats = [IDLE]

    def after(self, seconds: int, generated: int = 0, prefilled: int = 0) -> Need:
        """Let every worker compute so many tokens a second."""
        for _ in range(seconds):
            self.now += 1.0
            self.beats = [_later(beat, generated, prefilled) for beat in self.beats]
            for beat in self.beats:
                self.fleet.note_heartbeat(beat, self.now)
            self.fleet.sweep(self.now)
            self.needs.look(self.now)
        return self.needs.latest["m"]


def _later(beat: Heartbeat, generated: int, prefilled: int) -> Heartbeat:
    metrics = beat.metrics or WorkerMetrics()
    metrics = msgspec.structs.replace(
        metrics,
        generation_tokens=metrics.generation_tokens + generated,
        prefill_tokens=metrics.prefill_tokens + prefilled,
    )
    return msgspec.structs.replace(beat, metrics=metrics, step=beat.step + 1)


def beat(worker: str = "w0", **changes: object) -> Heartbeat:
    return msgspec.structs.replace(IDLE, worker=worker, **changes)


def test_idle_model_needs_one_worker_however_many_it_has() -> None:
    watched = Watched()
    watched.beats = [beat(f"w{number}") for number in range(5)]
    need = watched.after(60)
    assert (need.workers, need.needed) == (5, 1)


@pytest.mark.parametrize(
    ("running", "generated", "prefilled", "busy"),
    [(8, 0, 0, 1.0), (1, 300, 0, 0.75), (1, 100, 500, 0.75), (1, 0, 5000, 1.0), (4, 100, 0, 0.5)],
)
def test_worker_is_as_busy_as_its_slots_or_its_tokens_say(
    running: int, generated: int, prefilled: int, busy: float
) -> None:
    watched = Watched()
    watched.beats = [beat("w0", running=running), beat("w1", running=running)]
    need = watched.after(120, generated, prefilled)
    assert need.busy == pytest.approx(2 * busy, rel=0.01)
    assert need.needed == -(-2 * busy // 0.75)


def test_wait_is_worked_off_within_half_of_the_objective() -> None:
    # A prompt token waits for a millisecond: 20 s, four times what a request may wait.
    need = Watched(num_queued=100, num_tokens=20_000).after(1)
    assert need.predicted_wait_s > 20.0
    assert need.needed == pytest.approx(need.predicted_wait_s / 5.0, abs=1.0)


def test_one_long_prompt_asks_for_one_worker_at_most() -> None:
    assert Watched(num_queued=1, num_tokens=200_000).after(1).needed <= 2


def test_worker_whose_rates_are_unknown_does_not_multiply_the_wait() -> None:
    alone = Watched(num_queued=100, num_tokens=20_000).after(1).needed
    watched = Watched(num_queued=100, num_tokens=20_000)
    watched.beats += [beat(f"new{number}", prefill_rate=0.0, decode_rate=0.0) for number in range(3)]
    assert watched.after(1).needed <= alone


def test_batch_jobs_ask_for_what_finishes_them_in_an_hour_and_keep_no_worker_of_the_interactive_lane_busy() -> None:
    watched = Watched()
    jobs = WorkerMetrics(running_batch=8, batch_pending=45_000)
    watched.beats = [beat(running=8, metrics=jobs)]
    need = watched.after(60, generated=400)
    # 128 tokens each, as long as nothing else is known, at 400 tokens a second: 4 workers for an hour.
    assert need.lanes["interactive"] == 1
    assert need.needed == need.lanes["interactive"] + need.lanes["batch"] == 5 + 1
    assert need.busy == pytest.approx(0.0)


def test_need_rises_at_once_and_falls_after_five_minutes() -> None:
    watched = Watched(num_queued=100, num_tokens=20_000)
    peak = watched.after(1).needed
    watched.queued = (0, 0)
    assert watched.after(int(SCALE_DOWN_AFTER_S)).needed == peak > 3
    assert watched.after(2).needed == 1


def test_draining_worker_counts_no_more() -> None:
    watched = Watched()
    watched.beats = [beat("w0", running=8), beat("w1", running=8, draining=True)]
    need = watched.after(60)
    assert (need.workers, need.needed) == (1, 2)


def test_model_without_workers_keeps_its_need_until_it_is_forgotten() -> None:
    watched = Watched()
    watched.beats = [beat("w0", running=8)]
    watched.after(60)
    watched.beats = []
    need = watched.after(30)
    assert (need.workers, need.needed) == (0, 2)
    # While no worker of any model is heard, NATS may be away, and models are not forgotten.
    watched.beats = [beat("other", model="n")]
    with pytest.raises(KeyError):
        watched.after(int(MODEL_MEMORY_S) + 30)
    # Made-up workers can name any number of models.
    assert set(watched.needs._needs) == {"n"}


def test_counters_of_a_restarted_worker_begin_anew() -> None:
    watched = Watched()
    watched.beats = [beat(running=1)]
    watched.after(10, generated=1000)
    watched.beats = [beat(running=1)]
    assert 0 <= watched.after(60).busy <= 1
