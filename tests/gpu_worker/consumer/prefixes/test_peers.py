"""Which of the other workers are asked first."""

from __future__ import annotations

from gpu_worker.consumer.prefixes.peers import IN_VAIN_HALF_S, MAX_ASKED, PeerBeat, PeerPrefixes
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
