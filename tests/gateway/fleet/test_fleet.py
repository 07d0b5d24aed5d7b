"""What is queued and how fast it drains, by heartbeats and a clock that the test turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import msgspec
import pytest

from gateway.fleet import fleet as fleet_module
from gateway.fleet.fleet import GATEWAY_SILENCE_S, MAX_GATEWAYS, MAX_WORKERS, MODEL_MEMORY_S, Fleet
from gateway.fleet.fleet_load import FleetLoad, OwnRequests
from gateway.fleet.liveness import FleetLimits
from shared.disaggregation import PROMPT_QUEUES, RoleNews
from shared.features import FEATURES
from shared.messages import GatewayHeartbeat, Heartbeat
from shared.sampling import SamplingDefaults
from shared.worker_metrics import RankReading, WorkerMetrics

BEAT = Heartbeat(
    worker="w1",
    model="m",
    step=1,
    running=1,
    waiting=2,
    waiting_tokens=20,
    free_blocks=10,
    total_blocks=100,
    block_size=16,
    max_model_len=1000,
    max_num_seqs=8,
    prefill_rate=100.0,
    decode_rate=10.0,
    queue_pending=0,
    started=1.0,
    features=FEATURES,
)


class Watched:
    """A fleet and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.awaited = (100, 1000)
        self.fleet = Fleet("gw", FleetLimits(), OwnRequests(lambda model: (3, 30), lambda: {"m": self.awaited}))
        self.fleet.named_adapters.read_at = math.inf

    def hear(self, **changes: object) -> None:
        self.fleet.note_heartbeat(msgspec.structs.replace(BEAT, **changes), self.now)

    def can_claim(self, stream_seq: int, published_at: float) -> bool:
        return self.fleet.can_claim("m", "interactive", stream_seq, published_at, self.now - 0.5)

    def load(self) -> FleetLoad:
        load = self.fleet.load("m")
        assert load is not None
        return load

    def run(self, seconds: float, **changes: object) -> None:
        """Let time pass; with changes, a worker beats meanwhile."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if changes:
                self.hear(**changes)
            self.fleet.liveness.take_probes(self.now)
            self.fleet.sweep(self.now)


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.fleet.sweep(watched.now)
    watched.hear()
    return watched


def test_load_adds_up_live_workers_and_all_gateways(watched: Watched) -> None:
    watched.hear(worker="w2", free_blocks=5, max_model_len=500)
    watched.hear(worker="w3", draining=True)
    watched.hear(worker="w4", model="other")
    watched.fleet.note_gateway_heartbeat(GatewayHeartbeat(gateway="gw", unclaimed=9, unclaimed_tokens=9), watched.now)
    watched.fleet.note_gateway_heartbeat(GatewayHeartbeat(gateway="gw2", unclaimed=4, unclaimed_tokens=7), watched.now)
    load = watched.load()
    assert (load.num_workers, load.running, load.free_blocks, load.free_slots) == (2, 2, 15, 14)
    assert (load.queued_requests, load.queued_tokens) == (2 + 2 + 3 + 4, 20 + 20 + 30 + 7)
    assert (load.max_model_len, load.prefill_rate) == (500, 200.0)


def test_prompts_are_bounded_by_the_worker_that_takes_the_longest_and_not_while_one_has_no_bound() -> None:
    fleet = Fleet("gw", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
    bounds = []
    for worker, bound in (("a", 100), ("b", 200), ("c", 150), ("d", 0)):
        fleet.note_heartbeat(msgspec.structs.replace(BEAT, worker=worker, max_prompt_characters=bound), 100.0)
        load = fleet.load("m")
        assert load is not None
        bounds.append(load.max_prompt_characters)
    assert bounds == [100, 200, 200, 0]


def test_what_waits_at_another_gateway_counts_for_its_own_model_alone(watched: Watched) -> None:
    watched.hear(worker="w2", model="other")

    def queued(waiting: dict[str, tuple[int, int]]) -> list[int]:
        told = GatewayHeartbeat(gateway="gw2", unclaimed=9, unclaimed_tokens=90, unclaimed_of=waiting)
        watched.fleet.note_gateway_heartbeat(told, watched.now)
        loads = [watched.fleet.load(model) for model in ("m", "other")]
        return [number for load in loads if load for number in (load.queued_requests, load.queued_tokens)]

    nothing = queued({})
    assert [more - old for more, old in zip(queued({"other": (9, 90)}), nothing, strict=True)] == [0, 0, 9, 90]


def test_load_follows_this_gateways_own_requests_and_the_heartbeats() -> None:
    own = [(0, 0)]
    fleet = Fleet("gw", FleetLimits(), OwnRequests(lambda model: own[0], lambda: {"m": (100, 1000)}))
    fleet.note_heartbeat(BEAT, 100.0)

    def queued() -> tuple[int, int]:
        load = fleet.load("m")
        assert load is not None
        return load.queued_requests, load.queued_tokens

    idle = queued()
    for own[0] in ((1, 10), (1, 10), (2, 10), (1, 30), (0, 0), (1, 10)):
        assert queued() == (idle[0] + own[0][0], idle[1] + own[0][1])
        shown = fleet.reported_load("m")
        assert shown is not None
        assert (shown.queued_requests, shown.queued_tokens) == idle
    fleet.note_heartbeat(msgspec.structs.replace(BEAT, waiting=BEAT.waiting + 5), 100.2)
    assert queued() == (idle[0] + 6, idle[1] + 10)


def test_unknown_model_has_no_load_and_a_known_one_without_workers_has(watched: Watched) -> None:
    watched.hear(worker="w2", model="other")
    assert watched.fleet.load("nobody's") is None
    watched.run(2, worker="w2", model="other", step=3)
    assert watched.load().num_workers == 0


def test_nothing_is_unknown_while_no_worker_is_heard() -> None:
    assert Watched().load().num_workers == 0


def test_names_that_clients_make_up_are_not_kept_while_no_worker_is_heard(watched: Watched) -> None:
    fleet = watched.fleet
    watched.run(3)
    assert fleet.reported_load("m") is fleet.reported_load("m")
    made_up = fleet.reported_load("made up")
    assert made_up == fleet.reported_load("made up")
    assert made_up is not fleet.reported_load("made up")


def test_worker_makes_its_own_model_ready_and_the_fleet(watched: Watched) -> None:
    assert watched.fleet.is_ready("m")
    assert watched.fleet.is_ready()
    assert not watched.fleet.is_ready("other")


def test_draining_worker_is_not_ready_but_alive(watched: Watched) -> None:
    watched.hear(draining=True)
    assert not watched.fleet.is_ready("m")
    assert not watched.fleet.liveness.is_gone("w1")
    assert watched.fleet.models() == ["m"]


def test_worker_has_as_many_devices_as_its_heartbeat_names_ranks(watched: Watched) -> None:
    watched.fleet.note_heartbeat(BEAT, watched.now)
    assert [watched.fleet.num_devices(worker) for worker in (BEAT.worker, "unknown")] == [1, 1]
    ranks = tuple(RankReading(rank, True, 1, 0.0, 1) for rank in range(4))
    told = msgspec.structs.replace(BEAT, metrics=WorkerMetrics(ranks=ranks))
    watched.fleet.note_heartbeat(told, watched.now)
    assert watched.fleet.num_devices(BEAT.worker) == 4


def test_drafts_of_all_workers_are_counted(watched: Watched) -> None:
    drafts = {"spec_decode_num_drafts": 2, "spec_decode_num_draft_tokens": 8, "spec_decode_num_accepted_tokens": 5}
    watched.hear(**drafts)
    watched.hear(worker="w2", **drafts)
    load = watched.load()
    assert load.spec_decode_num_drafts == 4
    assert load.spec_decode_num_draft_tokens == 16
    assert load.spec_decode_num_accepted_tokens == 10


def test_model_whose_workers_are_gone_for_minutes_is_unknown_again(watched: Watched) -> None:
    watched.hear(worker="w2", model="other")
    watched.run(MODEL_MEMORY_S - 5, worker="w2", model="other", step=3, running=0)
    assert watched.fleet.load("m") is not None
    watched.run(20, worker="w2", model="other", step=3, running=0)
    assert watched.fleet.load("m") is None
    watched.hear()
    assert watched.load().num_workers == 1


def test_load_that_was_asked_for_before_is_forgotten_with_its_model(watched: Watched) -> None:
    watched.run(MODEL_MEMORY_S - 5, worker="w2", model="other", step=3, running=0)
    for _ in range(200):
        watched.hear(worker="w2", model="other", step=3, running=0)
        assert watched.fleet.load("m") is not None
        watched.run(0.1)
        if watched.fleet.load("m") is None:
            return
    pytest.fail("the model is still known")


def test_model_is_not_forgotten_while_nats_is_away(watched: Watched) -> None:
    watched.hear(worker="w2", model="other")
    watched.fleet.liveness.nats_disconnected()
    watched.run(2 * MODEL_MEMORY_S)
    watched.fleet.liveness.nats_reconnected(watched.now)
    watched.hear(worker="w2", model="other")
    assert watched.fleet.load("m") is not None


def test_format_of_a_model_is_that_of_most_of_its_workers(watched: Watched) -> None:
    for index, name in enumerate(["b", "a", "a"]):
        watched.hear(worker=f"w{index + 1}", chat_format=name)
    assert watched.load().chat_format == "a"


def test_format_of_a_model_is_known_as_long_as_the_model(watched: Watched) -> None:
    watched.hear(chat_format="hermes")
    watched.run(20, worker="w2", model="other", step=3, running=0)
    load = watched.load()
    assert (load.num_workers, load.chat_format) == (0, "hermes")
    watched.run(MODEL_MEMORY_S, worker="w2", model="other", step=3, running=0)
    watched.fleet.note_heartbeat(msgspec.structs.replace(BEAT, draining=True), watched.now)
    assert watched.load().chat_format == ""


def test_format_of_a_model_is_that_of_the_workers_that_were_left_last(watched: Watched) -> None:
    for worker, chat_format in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        watched.hear(worker=worker, chat_format=chat_format, running=0)
    watched.run(5, worker="w3", chat_format="b", running=0)
    assert watched.fleet.num_workers("m") == 1
    watched.run(5, worker="w9", model="other", running=0)
    load = watched.load()
    assert (load.num_workers, load.chat_format) == (0, "b")


def test_format_of_a_model_is_that_of_the_workers_that_go_on(watched: Watched) -> None:
    for worker, chat_format in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        watched.hear(worker=worker, chat_format=chat_format, draining=chat_format == "a")
    watched.run(5, worker="w9", model="other", running=0)
    load = watched.load()
    assert (load.num_workers, load.chat_format) == (0, "b")


@pytest.mark.parametrize(
    ("other", "has_room"),
    [
        ({}, True),
        ({"waiting": 1}, False),
        ({"queue_pending": 1}, False),
        ({"knows_queue": False}, False),
        ({"running": 7}, True),
        ({"running": 8}, False),
        ({"free_blocks": 7}, True),
        ({"free_blocks": 6}, False),
        ({"draining": True}, False),
        ({"model": "other"}, False),
        ({"roles": RoleNews("decode", ("ready",))}, False),
    ],
)
def test_room_elsewhere_is_for_a_whole_sequence_at_once(
    other: dict[str, object], has_room: bool, watched: Watched
) -> None:
    watched.hear(waiting=0)
    watched.hear(**{"worker": "w2", "waiting": 0} | other)
    assert watched.fleet.has_room_elsewhere("m", "w1", 6 * BEAT.block_size, has_output=False) == has_room


@pytest.mark.parametrize(
    ("others", "has_room"),
    [
        ((RoleNews("prefill"),), False),
        ((RoleNews("prefill"), RoleNews("decode", ("ready",))), True),
        ((RoleNews("both", (*PROMPT_QUEUES, "ready")),), True),
        ((None,), False),
    ],
)
def test_room_for_a_stream_is_at_workers_to_which_it_is_handed_over(
    others: tuple[RoleNews | None, ...], has_room: bool, watched: Watched
) -> None:
    watched.hear(waiting=1, roles=RoleNews("decode", ("ready",)))
    for number, roles in enumerate(others):
        watched.hear(worker=f"other{number}", waiting=0, roles=roles)
    assert watched.fleet.has_room_elsewhere("m", "w1", 1, has_output=True) == has_room
    # Where none decodes for others, those that compute prompts go on with them.
    watched.hear(waiting=1, roles=RoleNews("prefill"))
    watched.hear(worker="other0", waiting=0, roles=RoleNews("prefill"))
    watched.hear(worker="other1", waiting=0, roles=RoleNews("prefill"))
    assert watched.fleet.has_room_elsewhere("m", "w1", 1, has_output=True)


@pytest.mark.parametrize(
    ("worker", "is_lost"),
    [
        ({}, True),
        ({"queue_pending": 1}, False),
        ({"waiting": 1}, False),
        ({"running": 8}, False),
        # One that has just started has not seen the queue.
        ({"knows_queue": False}, False),
    ],
)
def test_what_waits_is_lost_where_a_worker_with_room_sees_an_empty_queue(
    worker: dict[str, object], is_lost: bool, watched: Watched
) -> None:
    watched.hear(**{"waiting": 0, "last_pulled": 7} | worker)
    assert watched.can_claim(7, watched.now) == is_lost
    # What was published later may not have been sent yet to a worker that is slow.
    assert not watched.can_claim(7, watched.now + 0.1)


def test_worker_that_has_yet_to_read_what_it_was_sent_does_not_prove_the_loss_of_a_request(watched: Watched) -> None:
    published_at = watched.now
    for last_pulled, is_lost in ((5, False), (6, False), (6, True), (9, True)):
        watched.now += 0.2
        watched.hear(waiting=0, last_pulled=last_pulled)
        assert watched.can_claim(7, published_at) == is_lost
    # It has said nothing since, whatever was not counted as its silence.
    watched.now += 3.0
    watched.fleet.discount_pause(3.0, watched.now)
    assert not watched.can_claim(7, published_at)
    # What is read right after a pause was told during it.
    for seconds, is_lost in ((0.0, False), (0.01, False), (0.3, False), (0.2, True)):
        watched.now += seconds
        watched.hear(waiting=0, last_pulled=6)
        assert watched.can_claim(7, published_at) == is_lost


def test_defaults_of_a_model_are_those_of_most_of_its_workers_and_known_as_long_as_the_model(watched: Watched) -> None:
    cool, warm = SamplingDefaults(temperature=0.6), SamplingDefaults(temperature=0.9)
    for index, defaults in enumerate([None, warm, cool, cool]):
        watched.hear(worker=f"w{index + 1}", sampling_defaults=defaults)
    assert watched.load().sampling_defaults == cool
    watched.run(20, worker="w9", model="other", step=3, running=0)
    load = watched.load()
    assert (load.num_workers, load.sampling_defaults) == (0, cool)


@pytest.mark.parametrize("are_away", [False, True])
def test_gateways_that_heard_the_workers_in_another_order_sample_alike(are_away: bool) -> None:
    workers = [
        {"worker": f"w{index}", "chat_format": name, "sampling_defaults": defaults, "running": 0}
        for index, (name, defaults) in enumerate(
            [("b", SamplingDefaults(temperature=0.9)), ("a", None), ("c", SamplingDefaults(temperature=0.6, top_k=20))]
        )
    ]
    seen = set()
    for order in itertools.permutations(workers):
        watched = Watched()
        watched.fleet.sweep(watched.now)
        for _ in range(2):
            for worker in order:
                watched.hear(**worker)
        if are_away:
            watched.run(20, worker="w9", model="other", running=0)
        load = watched.load()
        assert load.num_workers == (0 if are_away else 3)
        seen.add((load.chat_format, load.sampling_defaults))
    assert len(seen) == 1


def test_traits_are_added_up_when_they_change_and_not_with_each_heartbeat(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.fleet.sweep(watched.now)
    added_up: list[list[str]] = []
    add_up = fleet_module._answer_traits
    monkeypatch.setattr(
        fleet_module, "_answer_traits", lambda heard: added_up.append([h.chat_format for h in heard]) or add_up(heard)
    )
    for chat_format in ("", "", "hermes", "hermes"):
        watched.hear(chat_format=chat_format)
        watched.fleet.sweep(watched.now)
    watched.hear(worker="w2", chat_format="hermes")
    watched.hear(worker="w3", chat_format="hermes")
    watched.fleet.sweep(watched.now)
    assert added_up == [["hermes"], ["hermes", "hermes", "hermes"]]


def test_workers_that_are_made_up_cost_no_look_at_all_others_each(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_workers, num_looks = 300, 0
    live = watched.fleet.liveness.live

    def counted() -> Iterator[Heartbeat]:
        nonlocal num_looks
        for heartbeat in live():
            num_looks += 1
            yield heartbeat

    monkeypatch.setattr(watched.fleet.liveness, "live", counted)
    for beat in range(3):
        for number in range(num_workers):
            watched.hear(worker=f"w{number}", model=f"m{number}", chat_format=f"f{beat}")
        watched.fleet.sweep(watched.now)
    watched.run(3)
    assert watched.fleet.liveness.num_workers == 0
    # A few times all, and not all for each one.
    assert num_looks < 20 * num_workers


def test_worker_beyond_the_limit_has_no_room_and_those_that_are_known_keep_theirs() -> None:
    watched = Watched()
    for number in range(MAX_WORKERS):
        watched.hear(worker=f"w{number}", model=f"m{number}")
    assert watched.fleet.has_room_for("w0")
    assert not watched.fleet.has_room_for("new")


def test_models_without_workers_are_not_kept_without_limit() -> None:
    watched = Watched()
    for number in range(MAX_WORKERS + 10):
        watched.hear(worker="liar", model=f"m{number}")
    watched.hear(worker="w1", model="m0")
    watched.fleet.sweep(watched.now)
    unknown = [number for number in range(MAX_WORKERS + 10) if watched.fleet.load(f"m{number}") is None]
    assert len(unknown) == 10
    assert 0 not in unknown


def test_gateways_that_are_made_up_are_not_kept_without_limit(watched: Watched) -> None:
    for number in range(MAX_GATEWAYS + 10):
        beat = GatewayHeartbeat(gateway=f"g{number}", unclaimed=1, unclaimed_tokens=1)
        watched.fleet.note_gateway_heartbeat(beat, watched.now)
    load = watched.load()
    assert load.num_gateways == 1 + MAX_GATEWAYS
    watched.fleet.note_gateway_heartbeat(GatewayHeartbeat(gateway="g0", unclaimed=9, unclaimed_tokens=9), watched.now)
    assert watched.load().queued_requests == load.queued_requests + 8


def test_feature_is_used_once_all_gateways_that_run_have_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, uses = watched.fleet, list[bool]()
    now = fleet._began_at
    monkeypatch.setattr("gateway.fleet.fleet.time.monotonic", lambda: now)
    # The wall clock may be set while it runs.
    monkeypatch.setattr("gateway.fleet.fleet.time.time", lambda: fleet.started - 3600)

    def beat(name: str, *features: str) -> None:
        heartbeat = GatewayHeartbeat(gateway=name, unclaimed=0, unclaimed_tokens=0, features=features)
        fleet.note_gateway_heartbeat(heartbeat, watched.now)

    # Others may run that it has not heard yet.
    uses.append(fleet.do_gateways_understand("new"))
    now += GATEWAY_SILENCE_S + 0.1
    beat("newer", "new", "newest")
    uses.append(fleet.do_gateways_understand("new"))
    beat("older")
    uses.append(fleet.do_gateways_understand("new"))
    watched.now += GATEWAY_SILENCE_S + 0.1
    fleet.sweep(watched.now)
    uses.append(fleet.do_gateways_understand("new"))
    assert uses == [False, True, False, True]


def test_claims_of_a_worker_count_no_more_than_what_gateways_have_given_out(watched: Watched) -> None:
    watched.hear(worker="liar", waiting=100_000, waiting_tokens=10**9)
    for awaited, requests, most_tokens in (((0, 0), 0, 0), ((4, 100), 4, 4 * 256 + 350)):
        watched.awaited = awaited
        watched.hear()
        load = watched.load()
        assert (load.queued_requests, load.queued_tokens) == (requests + 3, most_tokens + 30)


def test_requests_that_other_gateways_have_given_out_count_too(watched: Watched) -> None:
    watched.hear(waiting=1000, waiting_tokens=10**9)
    watched.awaited = (4, 100)
    for awaited, requests in (
        ({"m": (10, 1)}, 4 + 10),
        # Its heartbeat is older than ours: requests are spread over gateways.
        ({}, 4 + 4),
        # One of an older version does not say.
        (None, 1000),
    ):
        beat = GatewayHeartbeat(gateway="gw2", unclaimed=0, unclaimed_tokens=0, awaited=awaited)
        watched.fleet.note_gateway_heartbeat(beat, watched.now)
        load = watched.load()
        assert load.queued_requests == requests + 3


@pytest.mark.parametrize("discount", [Fleet.discount_pause, Fleet.discount_silence])
def test_silence_of_a_gateway_before_a_pause_counts(
    watched: Watched, discount: Callable[[Fleet, float, float], None]
) -> None:
    watched.fleet.note_gateway_heartbeat(GatewayHeartbeat(gateway="g", unclaimed=9, unclaimed_tokens=9), watched.now)
    watched.now += GATEWAY_SILENCE_S - 1
    discount(watched.fleet, 2.0, watched.now)
    gateways = []
    for _ in range(2):
        watched.now += 2.5
        watched.fleet.sweep(watched.now)
        gateways.append(watched.fleet.gateways)
    assert gateways == [{"g"}, set()]
