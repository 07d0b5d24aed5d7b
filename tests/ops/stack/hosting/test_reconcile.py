"""Decisions of a host: what starts, what stops, and lives in which memory never overflows and everyone has a turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ops.stack.hosting.reconcile import LEAST_TURN_S, Activity, Decision, SeenWorker, Wanted, decide

BUDGET, MIN_AWAKE_S = 10, 5.0


def worker(model: str, number: int = 0, *, phase: str = "ready", generation: int = 0, **given: object) -> SeenWorker:
    values = {"need_bytes": 6, "ready_at": 0.0, **given}
    return SeenWorker(f"{model}-{generation}-{number}", model, generation, phase=phase, **values)  # type: ignore[arg-type]


def on_demand(name: str, **given: object) -> Wanted:
    return Wanted(name, on_demand=True, **{"need_bytes": 6, "idle_s": 20.0, **given})  # type: ignore[arg-type]


def decided(wanted: list[Wanted], workers: list[SeenWorker], now: float = 100.0, **activities: Activity) -> Decision:
    names = {want.name: want for want in wanted}
    return decide(names, workers, activities, budget_bytes=BUDGET, min_awake_s=MIN_AWAKE_S, now=now)


def test_missing_workers_start_and_those_of_unloaded_models_stop() -> None:
    found = decided([Wanted("a", workers=2, need_bytes=5)], [worker("gone")])
    assert found.stops == ["gone-0-0"]
    # Memory is free once its process has ended, not before.
    assert found.starts == []
    assert decided([Wanted("a", workers=2, need_bytes=5)], []).starts == ["a", "a"]


def test_old_generation_serves_until_the_new_one_does() -> None:
    want = Wanted("a", generation=1, need_bytes=3)
    old = worker("a", need_bytes=3)
    assert decided([want], [old]) == Decision(starts=["a"])
    assert decided([want], [old, worker("a", generation=1, need_bytes=3, phase="loading")]) == Decision()
    assert decided([want], [old, worker("a", generation=1, need_bytes=3)]) == Decision(stops=["a-0-0"])


def test_model_sleeps_only_when_idle_for_long_and_wakes_when_requests_wait() -> None:
    want = on_demand("a")
    assert decided([want], [worker("a")], a=Activity(active_at=90)) == Decision()
    assert decided([want], [worker("a")], a=Activity(active_at=79)) == Decision(stops=["a-0-0"])
    assert decided([want], [worker("a", busy=True)], a=Activity(active_at=79)) == Decision()
    assert decided([want], [worker("a")], a=Activity(waiting=1, active_at=79)) == Decision()
    assert decided([want], [], a=Activity(active_at=79)) == Decision()
    assert decided([want], [], a=Activity(waiting=1)) == Decision(starts=["a"])
    assert decided([want], [], a=Activity(asked=True)) == Decision(starts=["a"])


def test_model_that_is_asked_for_does_not_give_way_before_it_was_used() -> None:
    wanted, waiting = [on_demand("a"), on_demand("b")], Activity(waiting=1, waits_since=80)
    assert decided(wanted, [worker("a")], a=Activity(asked=True), b=waiting) == Decision(no_room={"b"})
    assert decided(wanted, [worker("a")], a=Activity(active_at=90), b=waiting) == Decision(stops=["a-0-0"])


def test_request_that_comes_while_a_worker_stops_starts_another_one() -> None:
    want = on_demand("a", need_bytes=5)
    stopping = worker("a", need_bytes=5, phase="stopping")
    assert decided([want], [stopping], a=Activity(waiting=1)) == Decision(starts=["a"])


def test_model_that_has_waited_longest_gets_the_room_that_was_made_for_it() -> None:
    """The one that gave way may have requests again before its process has ended: it takes its turn."""
    wanted = [on_demand("a"), on_demand("b")]
    activities = {"a": Activity(waiting=1, waits_since=99), "b": Activity(waiting=1, waits_since=80)}
    assert decided(wanted, [worker("a", phase="stopping")], **activities) == Decision(no_room={"a"})
    assert decided(wanted, [], **activities).starts == ["b"]
    assert decided(wanted[::-1], [], **activities).starts == ["b"]


def test_room_that_becomes_free_for_one_is_not_taken_by_a_smaller_one() -> None:
    wanted = [on_demand("big", need_bytes=8), on_demand("small", need_bytes=4)]
    activities = {"big": Activity(waiting=1, waits_since=80), "small": Activity(waiting=1, waits_since=90)}
    assert decided(wanted, [worker("a", phase="stopping")], **activities).starts == []


def test_model_that_is_only_asked_for_waits_for_those_with_requests_and_for_those_in_use() -> None:
    wanted = [on_demand("a"), on_demand("b")]
    asked = Activity(asked=True, waits_since=50)
    assert decided(wanted, [], a=asked, b=Activity(waiting=1, waits_since=99)).starts == ["b"]
    served = [worker("b", ready_at=0.0)]
    assert decided(wanted, served, a=asked, b=Activity(active_at=96)) == Decision(no_room={"a"})
    assert decided(wanted, served, a=asked, b=Activity(active_at=95)) == Decision(stops=["b-0-0"])


def test_least_recently_used_idle_model_gives_way() -> None:
    wanted = [on_demand("a", need_bytes=5), on_demand("b", need_bytes=5), on_demand("c", need_bytes=5)]
    workers = [worker("a", need_bytes=5), worker("b", need_bytes=5)]
    activities = {"a": Activity(active_at=95), "b": Activity(active_at=90), "c": Activity(waiting=1)}
    assert decided(wanted, workers, 100.0, **activities) == Decision(stops=["b-0-0"])
    stopping = [worker("a", need_bytes=5), worker("b", need_bytes=5, phase="stopping")]
    # Memory that is about to be free is waited for: no other model has to give way.
    assert decided(wanted, stopping, 100.0, **activities) == Decision()


@pytest.mark.parametrize(
    ("other", "activity"),
    [
        (worker("b", busy=True), Activity(active_at=90)),
        (worker("b"), Activity(waiting=1, active_at=90)),
        (worker("b", ready_at=96.0), Activity(active_at=96)),
        (worker("b", phase="loading"), Activity(asked=True)),
    ],
    ids=["runs", "waits", "has just been loaded", "is loading"],
)
def test_model_that_cannot_give_way_stays(other: SeenWorker, activity: Activity) -> None:
    found = decided([on_demand("a"), on_demand("b")], [other], a=Activity(waiting=1), b=activity)
    assert found == Decision(no_room={"a"})


def test_model_that_always_runs_never_gives_way() -> None:
    found = decided([on_demand("a"), Wanted("b", need_bytes=6)], [worker("b")], a=Activity(waiting=1))
    assert found == Decision(no_room={"a"})


def test_nothing_starts_in_the_pause_after_a_failure() -> None:
    activity = Activity(waiting=1, may_start_at=101)
    assert decided([on_demand("a")], [], a=activity) == Decision()
    assert decided([on_demand("a")], [], now=101, a=activity) == Decision(starts=["a"])


def test_busy_model_gives_way_to_one_whose_requests_have_waited_as_long_as_it_must_serve() -> None:
    wanted = [on_demand("a"), on_demand("b"), on_demand("c")]
    serving = worker("b", busy=True, ready_at=90.0)
    longest, later = Activity(waiting=1, waits_since=94.9), Activity(waiting=1, waits_since=99.0)
    both = {"a": later, "b": Activity(waiting=3), "c": longest}
    assert decided(wanted, [serving], 100.0, **both) == Decision(stops=["b-0-0"], no_room={"a", "b"})
    # Once its process has ended, the turn is that of the one that has waited longest, whatever comes for others.
    assert decided(wanted, [], 101.0, **both).starts == ["c"]
    for fresh in (later, Activity(asked=True, waits_since=50.0)):
        assert decided(wanted[:2], [serving], 100.0, a=fresh, b=Activity()) == Decision(no_room={"a"})
    serving = worker("b", busy=True, ready_at=96.0)
    assert decided(wanted[:2], [serving], 100.0, a=longest, b=Activity()) == Decision(no_room={"a"})


def test_busy_model_takes_requests_before_it_gives_way_even_without_a_least_time_awake() -> None:
    wanted = {name: on_demand(name) for name in "ab"}
    activities = {"a": Activity(waiting=3), "b": Activity(waiting=1, waits_since=98.0)}

    def stops(now: float, *, busy: bool) -> list[str]:
        activities["a"].waiting = 3 if busy else 0
        seen = [worker("a", ready_at=100.0, busy=busy)]
        return decide(wanted, seen, activities, budget_bytes=BUDGET, min_awake_s=0.0, now=now).stops

    assert stops(100.0, busy=True) == []
    assert stops(100.0 + LEAST_TURN_S, busy=True) == ["a-0-0"]
    assert stops(100.0, busy=False) == ["a-0-0"]


def test_batch_jobs_end_nothing_that_serves_people_and_people_do_not_wait_for_them() -> None:
    wanted = [on_demand("a"), on_demand("b")]
    jobs, people = Activity(waiting=2, batch=2, waits_since=50.0), Activity(waiting=2, batch=1, waits_since=99.9)
    with_people, with_jobs = worker("b", busy=True), worker("b", busy=True, only_batch=True)
    assert decided(wanted, [with_people], a=jobs, b=Activity()) == Decision(no_room={"a"})
    assert decided(wanted, [with_jobs], a=jobs, b=Activity(waiting=1, batch=0)) == Decision(no_room={"a"})
    # Batch jobs take turns with batch jobs; people take theirs at once.
    assert decided(wanted, [with_jobs], a=jobs, b=Activity()) == Decision(stops=["b-0-0"])
    assert decided(wanted, [with_jobs], a=people, b=Activity(active_at=100)) == Decision(stops=["b-0-0"])
    assert decided(wanted, [], a=jobs, b=people).starts == ["b"]


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_models_that_are_always_busy_take_turns_and_none_thrashes(names: str) -> None:
    life = Life(0)
    life.wanted = {name: on_demand(name) for name in names}
    life.activities = {name: Activity() for name in names}
    life.waiting = dict.fromkeys(names, 0)
    served = dict.fromkeys(names, 0)
    for _ in range(3000):
        for name in names:
            life.waiting[name] += 1
        life.step(comes=False)
        for each in life.workers.values():
            served[each.model] += each.phase == "ready"
    # Turns of equal length, in which most of the time goes into serving; `step` checks the least length of each.
    assert min(served.values()) > 0.7 * max(served.values())
    assert sum(served.values()) > 1000
    assert life.starts < life.now / MIN_AWAKE_S


@dataclass
class Life:
    """A host whose processes take random times to load and to end, and whose requests come at random."""

    seed: int
    now: float = 0.0
    wanted: dict[str, Wanted] = field(default_factory=dict)
    activities: dict[str, Activity] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    workers: dict[str, SeenWorker] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    served: int = 0
    starts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for number in range(self.random.randint(1, 5)):
            name = f"m{number}"
            on_demand = number > 0 or self.random.random() < 0.5
            idle_s, need_bytes = self.random.choice([2.0, 20.0]), self.random.randint(1, 5)
            self.wanted[name] = Wanted(name, on_demand=on_demand, idle_s=idle_s, need_bytes=need_bytes)
            self.activities[name] = Activity()
            self.waiting[name] = 0

    def step(self, *, comes: bool) -> None:
        self.now += self.random.choice([0.2, 1.0, 3.0])
        self._change()
        if comes:
            for name in self.wanted:
                self.waiting[name] += self.random.random() < 0.2
            if self.random.random() < 0.03:
                name = self.random.choice(list(self.wanted))
                want = self.wanted[name]
                changed = Wanted(name, want.generation + 1, 1, want.on_demand, want.idle_s, self.random.randint(1, 5))
                self.wanted[name] = changed
        self._serve()
        for name, activity in self.activities.items():
            own = [each for each in self.workers.values() if each.model == name]
            activity.note(self.waiting[name], 0, own, self.now)
        found = decide(self.wanted, list(self.workers.values()), self.activities, BUDGET, MIN_AWAKE_S, self.now)
        self._check_stops(found)
        for id_ in found.stops:
            self._set(id_, phase="stopping")
            self.until[id_] = self.now + self.random.choice([0.1, 5.0])
        for name in found.starts:
            self.starts += 1
            id_ = f"{name}/{self.starts}"
            want = self.wanted[name]
            self.workers[id_] = SeenWorker(id_, name, want.generation, want.need_bytes, "loading")
            self.until[id_] = self.now + self.random.choice([0.1, 8.0])
        assert sum(each.need_bytes for each in self.workers.values()) <= BUDGET

    def _set(self, id_: str, **changes: object) -> None:
        old = self.workers[id_]
        values = {name: getattr(old, name) for name in SeenWorker.__slots__} | changes
        self.workers[id_] = SeenWorker(**values)

    def _change(self) -> None:
        for id_, each in list(self.workers.items()):
            if self.now < self.until[id_]:
                continue
            if each.phase == "loading":
                self._set(id_, phase="ready", ready_at=self.now)
                self.activities[each.model].active_at = self.now
            elif each.phase == "stopping":
                del self.workers[id_]
            elif self.random.random() < 0.01:
                del self.workers[id_]  # it crashed
            else:
                self._set(id_, busy=False)

    def _serve(self) -> None:
        for id_, each in list(self.workers.items()):
            if each.phase == "ready" and self.waiting[each.model]:
                self.waiting[each.model], self.served = 0, self.served + self.waiting[each.model]
                self._set(id_, busy=True)
                self.until[id_] = self.now + self.random.choice([0.1, 4.0])

    def _check_stops(self, found: Decision) -> None:
        for id_ in found.stops:
            each = self.workers[id_]
            want = self.wanted[each.model]
            if each.generation != want.generation:
                continue
            # Only models that may; after a turn where another one takes it, and a busy one for one that waited as long.
            assert want.on_demand
            idle_s = self.now - self.activities[each.model].active_at
            assert idle_s >= want.idle_s or self.now - each.ready_at >= MIN_AWAKE_S
            if each.busy or self.waiting[each.model]:
                since = min(activity.waits_since for activity in self.activities.values() if activity.waiting)
                assert self.now - since >= MIN_AWAKE_S


@pytest.mark.parametrize("seed", range(60))
def test_random_life_never_overflows_and_serves_everything_that_fits(seed: int) -> None:
    life = Life(seed)
    for _ in range(300):
        life.step(comes=True)
    always = sum(want.need_bytes for want in life.wanted.values() if not want.on_demand)
    fits = all(always + want.need_bytes <= BUDGET for want in life.wanted.values() if want.on_demand)
    # Once nothing more comes, everybody's turn comes, and all that can sleep do.
    for _ in range(400):
        life.step(comes=False)
    if fits:
        assert not [name for name, count in life.waiting.items() if count]
        assert {each.model for each in life.workers.values()} <= {
            w.name for w in life.wanted.values() if not w.on_demand
        }
    assert life.starts < 700


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_tenant_that_always_comes_back_starves_no_other_model(order: str) -> None:
    """One client of `a` asks again half a second after each answer; a client of `b` asks once."""
    activities = {name: Activity() for name in "ab"}
    waiting = {"a": 0, "b": 1}
    state: tuple[str, str, float] | None = None  # model, phase, since
    last_answer, served_b = -1.0, None
    for tick in range(600):
        now = tick / 5
        waiting["a"] = int(now - last_answer >= 0.5)
        if state is not None and state[1] == "ready" and waiting[state[0]]:
            if state[0] == "b":
                served_b = now
                break
            waiting["a"], last_answer = 0, now
        seen = [] if state is None else [worker(state[0], phase=state[1], ready_at=state[2])]
        for name, activity in activities.items():
            activity.note(waiting[name], 0, [each for each in seen if each.model == name], now)
        found = decided([on_demand(name) for name in order], seen, now, **activities)
        if state is not None and state[1] == "stopping" and now - state[2] > 0.5:
            state = None
        elif state is not None and state[1] == "loading" and now - state[2] > 2.0:
            state = (state[0], "ready", now)
        elif state is not None and found.stops:
            state = (state[0], "stopping", now)
        elif found.starts:
            state = (found.starts[0], "loading", now)
    assert served_b is not None
    assert served_b < 20
