"""Who is alive, by heartbeats, probes and a clock that the test turns."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from gateway.dispatch.sweep import SILENT_SWEEP_INTERVAL_S, SWEEP_INTERVAL_S
from gateway.fleet.deaths import Death, RememberedDeaths
from gateway.fleet.liveness import FleetLimits, Liveness
from gateway.fleet.resumption import MARGIN_S, NUM_STEPS, Resumption
from gpu_worker.consumer.heartbeat import INTERVAL_S
from tests.gateway.fleet.test_fleet import BEAT

# What ticks add up to is a little off.
ROUNDING_S = 0.001


@dataclasses.dataclass
class Simulated:
    """A worker: `alive` beats and answers, `frozen` does neither, `gone` lets NATS answer that there is no listener."""

    name: str
    state: str = "alive"
    step: int = 1
    running: int = 0
    started: float = 1.0
    beaten_at: float = -1.0


class Watched:
    """Workers, the time, and who was found dead."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.deaths: list[Death] = []
        self.liveness = Liveness(FleetLimits(), self.deaths.append)
        self.workers = {name: Simulated(name) for name in names}
        self.run(0.5)

    def run(self, seconds: float) -> None:
        """Let time pass in ticks, as the dispatcher's sweep does."""
        until = self.now + seconds - ROUNDING_S
        while self.now < until:
            is_silent = self.liveness.is_anyone_silent(self.now)
            self.now += SILENT_SWEEP_INTERVAL_S if is_silent else SWEEP_INTERVAL_S
            for worker in self.workers.values():
                if worker.state == "alive" and self.now - worker.beaten_at > INTERVAL_S - ROUNDING_S:
                    self.beat(worker)
            self.liveness.sweep(self.now)
            for name in self.liveness.take_probes(self.now):
                state = self.workers[name].state
                if state == "alive":
                    self.liveness.note_answer(name, self.now)
                elif state == "gone":
                    self.liveness.note_absence(name, self.now)

    def beat(self, worker: Simulated) -> None:
        worker.beaten_at = self.now
        fields = {"worker": worker.name, "step": worker.step, "running": worker.running, "started": worker.started}
        self.liveness.note_heartbeat(msgspec.structs.replace(BEAT, **fields), self.now)

    @property
    def dead(self) -> list[str]:
        return [death.worker for death in self.deaths]

    @property
    def blamed(self) -> list[str]:
        return [death.worker for death in self.deaths if death.is_blamed]


@pytest.fixture
def watched() -> Watched:
    return Watched("a", "b", "c")


def test_worker_that_is_gone_is_dead_within_half_a_second(watched: Watched) -> None:
    watched.workers["a"].state = "gone"
    watched.run(0.5)
    assert watched.dead == watched.blamed == ["a"]
    assert watched.liveness.is_gone("a")
    assert not watched.liveness.is_gone("b")


def test_worker_that_is_gone_is_dead_before_its_silence_would_tell(watched: Watched) -> None:
    worker = watched.workers["a"]
    worker.state = "gone"
    watched.run(1)
    assert watched.deaths[0].found_at - worker.beaten_at < FleetLimits().punctual_silence_s


def test_gateways_expect_heartbeats_as_often_as_workers_send_them() -> None:
    assert FleetLimits().heartbeat_s == INTERVAL_S


def test_silent_workers_are_not_probed_with_every_sweep(watched: Watched) -> None:
    limits = FleetLimits()
    now = watched.now + limits.probe_after_s + 0.01
    everybody = ["a", "b", "c"]
    probed = [watched.liveness.take_probes(now + after_s) for after_s in (0.0, 0.1, limits.probe_interval_s + 0.01)]
    assert probed == [everybody, [], everybody]


def test_frozen_worker_that_is_new_has_more_time(watched: Watched) -> None:
    watched.workers["a"].state = "frozen"
    watched.run(0.55)
    assert watched.dead == []
    watched.run(0.6)
    assert watched.dead == watched.blamed == ["a"]
    assert watched.deaths[0].why.startswith("nothing was heard for ")


@pytest.mark.parametrize("on_time_s", [3, 30])
def test_frozen_worker_that_was_always_on_time_is_dead_after_two_missed_heartbeats(on_time_s: float) -> None:
    watched = Watched("a", "b", "c")
    watched.run(on_time_s)
    watched.workers["a"].state = "frozen"
    watched.run(0.14)
    assert watched.dead == []
    watched.run(0.31)
    assert watched.dead == watched.blamed == ["a"]


@pytest.mark.parametrize(
    ("silent_s", "again_s", "is_dead_again"), [(0.9, 0.65, False), (5, 0.45, True)], ids=["late", "stood still"]
)
def test_worker_that_was_late_has_more_time_for_a_while_and_one_that_stood_still_has_not(
    watched: Watched, silent_s: float, again_s: float, is_dead_again: bool
) -> None:
    watched.run(30)
    worker = watched.workers["a"]
    for state, span_s in (("frozen", silent_s), ("alive", 3)):
        worker.state = state
        watched.run(span_s)
    assert watched.dead == ["a"]
    worker.state = "frozen"
    watched.run(again_s)
    assert watched.dead == ["a"] * (1 + is_dead_again)


def test_worker_whose_heartbeats_are_late_has_more_time_until_it_is_on_time_again(watched: Watched) -> None:
    watched.run(30)
    worker = watched.workers["a"]
    for _ in range(4):
        worker.beaten_at += 0.2  # its next heartbeat comes so much later
        watched.run(0.5)
    worker.state = "frozen"
    watched.run(0.7)
    assert watched.dead == []
    worker.state = "alive"
    watched.run(30)
    worker.state = "frozen"
    watched.run(0.55)
    assert watched.dead == ["a"]


@pytest.mark.parametrize(
    ("state", "after_s", "dead", "blamed"),
    [
        ("frozen", 1.5, ["a"], []),
        ("gone", 1.5, ["a"], ["a"]),
        # The pause takes away what was known of punctual workers.
        ("frozen", 0.7, [], []),
    ],
)
def test_worker_that_is_silent_after_a_pause_is_dead_later_and_blamed_only_if_it_is_gone(
    watched: Watched, state: str, after_s: float, dead: list[str], blamed: list[str]
) -> None:
    watched.run(30)
    watched.now += 7
    watched.liveness.discount_pause(7, watched.now)
    watched.workers["a"].state = state
    watched.run(after_s)
    assert (watched.dead, watched.blamed) == (dead, blamed)


def test_worker_whose_heartbeats_are_lost_but_who_answers_lives(watched: Watched) -> None:
    watched.workers["a"].beaten_at = 1e9
    watched.run(20)
    assert watched.dead == []


@pytest.mark.parametrize(("state", "within_s", "blamed"), [("gone", 0.5, ["a"]), ("frozen", 2, [])])
def test_only_worker_is_blamed_if_it_is_gone_and_not_if_it_is_silent(
    state: str, within_s: float, blamed: list[str]
) -> None:
    watched = Watched("a")
    watched.workers["a"].state = state
    watched.run(within_s)
    assert (watched.dead, watched.blamed) == (["a"], blamed)


@pytest.mark.parametrize("state", ["gone", "frozen"])
def test_workers_that_end_together_are_dead_without_blame(watched: Watched, state: str) -> None:
    watched.workers["b"].beaten_at -= 0.05
    watched.workers["c"].beaten_at -= 0.1
    # Now each beats at a time of its own.
    watched.run(1)
    assert len({worker.beaten_at for worker in watched.workers.values()}) == 3
    for worker in watched.workers.values():
        worker.state = state
    watched.run(3)
    assert sorted(watched.dead) == ["a", "b", "c"]
    assert watched.blamed == []


def test_worker_is_not_blamed_for_having_ended_a_little_before_another_that_is_gone_too() -> None:
    watched = Watched("a", "b")
    heard_at = watched.now
    for worker, later_s in (("a", 0.0), ("b", 0.23)):
        watched.liveness.note_heartbeat(msgspec.structs.replace(BEAT, worker=worker), heard_at + later_s)
        watched.workers[worker].state = "gone"
    watched.now = heard_at + 0.26
    watched.run(2)
    assert (sorted(watched.dead), watched.blamed) == (["a", "b"], [])


def test_last_worker_that_ended_together_with_one_whose_death_was_found_before_is_not_blamed() -> None:
    watched = Watched("a", "b")
    watched.workers["a"].state, watched.workers["b"].state = "gone", "frozen"
    for _ in range(20):
        if not watched.dead:
            watched.run(0.05)
    assert watched.dead == ["a"]
    watched.workers["b"].state = "gone"
    watched.run(2)
    assert (watched.dead, watched.blamed) == (["a", "b"], [])


def test_last_worker_that_has_outlived_another_by_more_than_a_heartbeat_is_blamed_too() -> None:
    watched = Watched("a", "b")
    for worker in watched.workers.values():
        watched.beat(worker)
    watched.workers["a"].state = "gone"
    watched.run(0.3)
    watched.workers["b"].state = "gone"
    watched.run(2)
    assert watched.dead == watched.blamed == ["a", "b"]


def test_workers_that_end_one_after_the_other_are_each_blamed(watched: Watched) -> None:
    for name in ("a", "b", "c"):
        watched.workers[name].state = "gone"
        watched.run(0.6)
    assert watched.blamed == ["a", "b", "c"]


def test_frozen_worker_that_wakes_up_is_alive_and_not_blamed_any_more(watched: Watched) -> None:
    watched.workers["a"].state = "frozen"
    watched.run(2)
    assert watched.blamed == ["a"]
    watched.workers["a"].state = "alive"
    watched.run(0.5)
    assert watched.blamed == []
    assert not watched.liveness.is_gone("a")


def test_dead_worker_whose_successor_has_its_name_stays_blamed(watched: Watched) -> None:
    watched.workers["a"].state = "gone"
    watched.run(1)
    watched.workers["a"] = Simulated("a", started=2.0)
    watched.run(0.5)
    assert watched.blamed == ["a"]
    assert not watched.liveness.is_gone("a")


def test_worker_whose_steps_stand_still_is_dead_although_it_beats(watched: Watched) -> None:
    worker = watched.workers["a"]
    worker.running = 1
    watched.run(9.7)
    assert watched.dead == []
    watched.run(0.6)
    assert watched.dead == watched.blamed == ["a"]
    watched.run(20)
    assert watched.dead == ["a"]
    worker.step += 1
    watched.run(0.5)
    assert watched.blamed == []
    assert not watched.liveness.is_gone("a")


def test_idle_worker_may_stand_still(watched: Watched) -> None:
    watched.run(30)
    assert watched.dead == []


def test_restarted_worker_of_the_same_name_is_another(watched: Watched) -> None:
    watched.workers["a"].started = 2.0
    watched.run(0.7)
    assert watched.dead == watched.blamed == ["a"]
    assert not watched.liveness.is_gone("a")


def test_worker_restarted_while_nats_was_away_is_dead_without_blame(watched: Watched) -> None:
    watched.liveness.nats_disconnected()
    watched.run(1)
    watched.liveness.nats_reconnected(watched.now)
    watched.workers["a"].started = 2.0
    watched.run(0.7)
    assert (watched.dead, watched.blamed) == (["a"], [])


def test_two_workers_of_one_name_condemn_no_request(watched: Watched) -> None:
    for _ in range(50):
        for started in (2.0, 1.0):
            watched.workers["a"].started = started
            watched.run(0.1)
    assert watched.dead == []
    # When the first one has ended, the second holds the name; it may as well be the other way round.
    watched.workers["a"].started = 2.0
    watched.run(1)
    assert len(watched.dead) <= 1
    assert not watched.liveness.is_gone("a")


def test_no_worker_dies_while_nats_is_away(watched: Watched) -> None:
    for worker in watched.workers.values():
        worker.state = "gone"
    watched.liveness.nats_disconnected()
    watched.run(20)
    assert not watched.liveness.is_gone("a")
    watched.liveness.nats_reconnected(watched.now)
    watched.run(1.4)
    assert watched.dead == []
    watched.run(1.0)
    assert sorted(watched.dead) == ["a", "b", "c"]


def test_pause_of_this_process_proves_nothing_about_others(watched: Watched) -> None:
    worker = watched.workers["a"]
    worker.running = 1
    watched.run(8.5)
    watched.now += 60
    watched.liveness.discount_pause(60, watched.now)
    watched.liveness.sweep(watched.now)
    watched.run(0.8)
    assert watched.dead == []
    worker.running = 0
    watched.run(0.3)
    worker.state = "gone"
    watched.run(0.6)
    assert watched.dead == ["a"]


def test_death_of_all_workers_is_found_over_a_link_on_which_every_answer_is_late(watched: Watched) -> None:
    for worker in watched.workers.values():
        worker.state = "frozen"
    for _ in range(4):
        watched.run(0.65)
        watched.liveness.discount_silence(0.65, watched.now)
    assert sorted(watched.dead) == sorted(watched.workers)


def test_silence_of_nats_is_no_death_as_often_as_workers_are_heard_after_it(watched: Watched) -> None:
    for _ in range(5):
        watched.now += 2
        watched.liveness.discount_silence(2, watched.now)
        assert not watched.liveness.is_anyone_silent(watched.now)
        watched.run(0.3)
    assert watched.dead == []


def test_pause_after_which_heartbeats_were_read_first_does_not_delay_the_next_death(watched: Watched) -> None:
    watched.now += 60
    for worker in watched.workers.values():
        watched.beat(worker)
    watched.liveness.discount_pause(60, watched.now)
    watched.workers["a"].state = "gone"
    watched.run(0.8)
    assert watched.dead == ["a"]


@pytest.mark.parametrize("cause", ["pause", "reconnect"])
def test_fleet_is_disturbed_for_a_while_after_it_could_not_be_heard(watched: Watched, cause: str) -> None:
    if cause == "pause":
        watched.liveness.discount_pause(1.0, watched.now)
    else:
        watched.liveness.nats_reconnected(watched.now)
    watched.run(2.0)
    assert watched.liveness.is_disturbed(watched.now)
    watched.run(1.0)
    assert not watched.liveness.is_disturbed(watched.now)


def test_fleet_is_disturbed_by_silence_and_for_a_while_after_a_death(watched: Watched) -> None:
    assert not watched.liveness.is_disturbed(watched.now)
    watched.workers["a"].state = "gone"
    watched.run(0.4)
    assert watched.liveness.is_disturbed(watched.now)
    watched.run(1.0)
    assert watched.liveness.is_disturbed(watched.now)
    assert watched.liveness.deaths.since("m", watched.now - 2) == watched.deaths
    assert watched.liveness.deaths.since("m", watched.now) == []
    assert watched.liveness.deaths.since("other", 0) == []
    watched.run(3)
    assert not watched.liveness.is_disturbed(watched.now)


def test_deaths_of_made_up_workers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched("honest", *(f"forged{number}" for number in range(300)))
    for number in range(300):
        watched.workers[f"forged{number}"].state = "gone"
    watched.run(2.0)
    assert len(watched.deaths) == 300
    told = [record for record in caplog.records if "is dead" in record.message]
    assert 100 <= len(told) <= 101


def test_return_of_a_worker_is_told_right_behind_its_death(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched("a", "b")
    watched.workers["a"].state = "frozen"
    watched.run(1.5)
    watched.workers["a"].state = "alive"
    watched.run(0.5)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "worker a is dead",
        "worker a is alive again",
    ]


BUSY = msgspec.structs.replace(BEAT, step=100, running=3, waiting=0, waiting_tokens=0)


def _heard(*beats: dict[str, int]) -> Resumption:
    resumption = Resumption()
    for number, changes in enumerate(beats):
        resumption.note_heartbeat(msgspec.structs.replace(BUSY, **changes), float(number))
    return resumption


@pytest.mark.parametrize(
    ("second", "has_stream_news", "has_prompt_news"),
    [
        ({"step": 100 + NUM_STEPS - 1}, False, False),
        ({"step": 100 + NUM_STEPS}, True, True),
        ({"step": 100 + NUM_STEPS, "waiting_tokens": 1}, True, False),
        ({"step": 100 + NUM_STEPS, "waiting": 1}, True, False),
        ({"running": 0}, True, True),
        ({"running": 0, "waiting": 1}, False, False),
    ],
)
def test_steps_tell_of_streams_and_computed_prompts_and_idleness_of_all(
    second: dict[str, int], has_stream_news: bool, has_prompt_news: bool
) -> None:
    resumption = _heard({}, second)
    for now, is_later in ((1.0 + MARGIN_S / 2, False), (1.0 + 2 * MARGIN_S, True)):
        assert resumption.is_complete(now, has_output=True) is (has_stream_news and is_later)
        assert resumption.is_complete(now, has_output=False) is (has_prompt_news and is_later)


def test_one_heartbeat_proves_nothing_and_later_ones_do_not_put_the_time_off() -> None:
    resumption = _heard({"running": 0, "step": 1000})
    assert not resumption.is_complete(50.0, has_output=True)
    assert not resumption.is_complete(50.0, has_output=False)
    assert _heard({}, {"step": 200}, {"step": 300}).is_complete(1.0 + 2 * MARGIN_S, has_output=True)


def test_each_absence_of_nats_begins_anew_and_others_never_resume() -> None:
    liveness = Liveness(FleetLimits())
    liveness.note_heartbeat(BUSY, 1.0)
    liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=200), 1.2)
    assert not liveness.has_resumed(BUSY.worker, 9.0, has_output=True)
    for away_at in (10.0, 20.0):
        liveness.nats_disconnected()
        liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=300), away_at + 1.0)
        assert not liveness.has_resumed(BUSY.worker, away_at + 5.0, has_output=True)
        liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=400), away_at + 1.2)
        assert liveness.has_resumed(BUSY.worker, away_at + 1.4, has_output=True)
    assert not liveness.has_resumed("unknown", 30.0, has_output=True)


@pytest.mark.parametrize(
    ("died", "kept"),
    [
        ([("a", 0), ("b", 300), ("c", 600)], "abc"),
        ([("a", 0), ("b", 300), ("c", 600), ("d", 601)], "bcd"),
        # A worker that dies again keeps no older death in memory.
        ([("a", 0), ("b", 1), ("a", 590), ("c", 602)], "ac"),
    ],
)
def test_deaths_of_ten_minutes_are_remembered(died: list[tuple[str, float]], kept: str) -> None:
    deaths = RememberedDeaths()
    for worker, at in died:
        deaths.add(Death(worker, "m", "it is not there any more", at, True), 1.0, at - 1)
    assert [death.worker for death in deaths.since("m", 0.0)] == [*kept]


def test_many_deaths_hide_no_latest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.deaths._MAX_REMEMBERED", 3)
    deaths = RememberedDeaths()
    for at, name in enumerate("abcdefg"):
        deaths.add(Death(name, f"model-{name}", "it is not there any more", at, True), 1.0, at - 1)
        assert deaths.latest(f"model-{name}") == at
        assert at >= 3 or deaths.latest("model-a") == 0
        assert len(deaths._latest) <= 3
        kept = [each for each in "abcdefg" if deaths.since(f"model-{each}", 0.0)]
        assert kept == [*"abcdefg"][max(0, at - 2) : at + 1]
