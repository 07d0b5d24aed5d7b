"""Which of the other workers are asked first."""

from __future__ import annotations

import msgspec
import pytest

from gpu_worker.consumer.prefixes.peers import IN_VAIN_HALF_S, MAX_ASKED, PeerBeat, PeerPrefixes, peer_beat
from shared.prefixes import PrefixNews


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
