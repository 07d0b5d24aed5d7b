"""Which of the other workers are asked first."""

from __future__ import annotations

import msgspec
import pytest

from gpu_worker.consumer.prefixes.peers import IN_VAIN_HALF_S, MAX_ASKED, PeerBeat, PeerPrefixes, peer_beat
from shared.prefixes import LINK_BYTES, PrefixNews


def test_worker_that_took_nothing_in_a_busy_minute_is_asked_again_although_others_fit() -> None:
    others, now = PeerPrefixes(), 100.0
    fleet = ["emptiest", *(f"w{number}" for number in range(MAX_ASKED))]

    def hear() -> None:
        for worker in fleet:
            others.note(PeerBeat(worker=worker, prefixes=PrefixNews(num_blank=9 if worker == "emptiest" else 5)), now)

    hear()
    assert others.emptier(1, now)[0] == "emptiest"
    for _ in range(60):
        others.note_asked("emptiest", has_taken=False)
    hear()
    assert "emptiest" not in others.emptier(1, now), "three others have taken what they were asked"
    # It is heard once a second, as ever.
    for _ in range(int(5 * IN_VAIN_HALF_S)):
        now += 1.0
        hear()
    assert others.emptier(1, now)[0] == "emptiest"


@pytest.mark.parametrize("extra", [0, 1])
def test_workers_that_announce_a_prefix_and_take_nothing_do_not_keep_its_holder_from_being_asked(extra: int) -> None:
    others, now, num_unasked = PeerPrefixes(), 100.0, 0
    chain = [bytes([place] * LINK_BYTES) for place in range(4)]
    places = {link: place for place, link in enumerate(chain)}
    liars = [f"z{number}" for number in range(4 * MAX_ASKED)]
    for _ in range(200):
        now += 0.1
        for worker in ("holder", *liars):
            announced = chain if worker != "holder" else chain[: len(chain) - extra]
            others.note(PeerBeat(worker=worker, prefixes=PrefixNews(links=b"".join(announced))), now)
        asked = [worker for _, worker in others.holders(places, now)]
        assert len(asked) == MAX_ASKED
        for worker in asked:
            others.note_asked(worker, has_taken=worker == "holder")
        num_unasked += "holder" not in asked
    # Each of the others is believed a few times, and again after a while.
    assert num_unasked < 60


@pytest.mark.parametrize(
    ("subject", "data", "is_own"),
    [
        ("hr.worker.m.w_2e1", {"worker": "w.1", "model": "m"}, True),
        ("hr.worker.m.liar", {"worker": "w.1", "model": "m"}, False),
        ("hr.worker.m.w_2e1", {"model": "m"}, False),
        ("hr.worker.m.w_2e1", "nonsense", False),
        ("hr.worker.m._", {"worker": "w.1"}, False),
    ],
)
def test_heartbeat_under_the_name_of_another_worker_is_not_of_its_sender(
    subject: str, data: object, is_own: bool
) -> None:
    assert (peer_beat(subject, msgspec.msgpack.encode(data)) is not None) is is_own
