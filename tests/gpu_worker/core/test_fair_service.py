"""Clients that always want more are served alike, whatever the others do; who wants little is served at once."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.sequence import Sequence, SequenceStatus
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.core.service_oracle import ServiceOracle, bound

SLOTS, BUDGET = 3, 12
MAX_PROMPT, MAX_OUTPUT = 16, 8


class Crowd:
    """A scheduler with clients that keep a number of requests waiting, each of its own sizes."""

    def __init__(
        self, client: str, *, num_blocks: int = 64, budget: int = BUDGET, max_steps_in_flight: int = 1
    ) -> None:
        self.harness = Harness(
            num_blocks=num_blocks,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=budget,
            max_steps_in_flight=max_steps_in_flight,
            headroom_tokens=MAX_OUTPUT,
        )
        self.oracle = ServiceOracle(lambda sequence: str(getattr(sequence, client)))
        self.sequences: list[Sequence] = []

    def add(self, num_tokens: int, max_tokens: int, **client: object) -> Sequence:
        sequence = make_sequence(num_tokens, max_tokens=max_tokens, ignore_eos=True, **client)  # type: ignore[arg-type]
        self.harness.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def num_waiting(self, client: dict[str, object]) -> int:
        return sum(all(getattr(s, name) == value for name, value in client.items()) for s in self.waiting())

    def waiting(self) -> list[Sequence]:
        self.sequences = [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]
        return [s for s in self.sequences if s.status is not SequenceStatus.RUNNING]

    def step(self) -> None:
        self.harness.now += 1.0
        while self.harness.can_submit():
            self.oracle.waits(self.waiting())
            plan = self.harness.try_schedule()
            if plan is None or not plan.scheduled:
                break
            self.oracle.serves(plan)
            self.oracle.waits(self.waiting())
        if self.harness.in_flight:
            self.harness.land()


clients = st.lists(
    # How many requests it keeps waiting, and the weight of its key.
    st.tuples(st.integers(2, 12), st.sampled_from([1.0, 1.0, 2.0, 4.0])),
    min_size=2,
    max_size=4,
)


def keep_waiting(crowd: Crowd, numbers: list[tuple[int, float]], name: str, chance: random.Random) -> None:
    """Let each client have its number of requests waiting, those of the first far longer than those of the others."""
    for place, (number, weight) in enumerate(numbers):
        client: dict[str, object] = {"tenant": "one", "key": "key", "weight": weight} | {name: f"{name}-{place}"}
        while crowd.num_waiting(client) < number:
            longest = MAX_PROMPT if place == 0 else 4
            crowd.add(chance.randint(1, longest), chance.randint(1, MAX_OUTPUT), **client)


@given(
    numbers=clients,
    name=st.sampled_from(["tenant", "key"]),
    seed=st.integers(0, 1000),
    num_blocks=st.sampled_from([10, 64]),
    max_steps_in_flight=st.integers(1, 2),
)
@settings(max_examples=10, deadline=None)
def test_clients_that_always_wait_are_served_alike_by_weight(
    numbers: list[tuple[int, float]], name: str, seed: int, num_blocks: int, max_steps_in_flight: int
) -> None:
    crowd, chance = Crowd(name, num_blocks=num_blocks, max_steps_in_flight=max_steps_in_flight), random.Random(seed)
    for _ in range(100):
        keep_waiting(crowd, numbers, name, chance)
        crowd.step()
    most = min(SLOTS * (MAX_PROMPT + MAX_OUTPUT), num_blocks * BLOCK)
    assert crowd.oracle.largest <= bound(MAX_PROMPT, most)


@given(seed=st.integers(0, 1000), num_others=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_first_token_beside_a_thousand_long_prompts_comes_within_a_few_steps(seed: int, num_others: int) -> None:
    """A tenant waits until each of the others has had as much as its last request: 9 + 2 x 4 tokens, of 12 a step."""
    harness, chance = Harness(max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET, headroom_tokens=4), random.Random(seed)
    for each in range(1000):
        harness.add(make_sequence(200, max_tokens=4, tenant=f"greedy-{each % num_others}"))
    for _ in range(chance.randint(1, 200)):
        harness.step()
    for _ in range(5):
        light = make_sequence(chance.randint(1, BUDGET - SLOTS), max_tokens=4, ignore_eos=True, tenant="light")
        harness.add(light)
        num_steps = 0
        while not harness.output[light.id]:
            harness.step()
            num_steps += 1
        assert num_steps <= 4 + num_others * (BUDGET - SLOTS + 2 * 4) / BUDGET
        while light.status is not SequenceStatus.FINISHED:
            harness.step()


def test_priority_of_a_tenant_puts_it_ahead_for_a_while_and_nobody_starves() -> None:
    crowd = Crowd("tenant", num_blocks=256, budget=64)
    plain = [crowd.add(300, 1, tenant="plain", arrival=0.0) for _ in range(2)]
    started = []
    for _ in range(150):
        while crowd.num_waiting({"tenant": "urgent"}) < 4:
            crowd.add(300, 1, tenant="urgent", priority=1, arrival=crowd.harness.now)
        crowd.step()
        started.append(plain[0].status is not SequenceStatus.WAITING)
    assert not any(started[:60])
    assert all(started[-20:])


def test_priority_within_a_key_is_worth_a_minute_of_waiting() -> None:
    harness = Harness(max_num_seqs=1)
    old, young = make_sequence(4, arrival=0.0), make_sequence(4, arrival=59.0, priority=1)
    late = make_sequence(4, arrival=61.0, priority=1)
    harness.add(late, old, young)
    harness.run()
    assert [young.scheduled_at, old.scheduled_at, late.scheduled_at] == sorted(
        [young.scheduled_at, old.scheduled_at, late.scheduled_at]  # type: ignore[type-var]
    )
    assert list(harness.finish) == [young.id, old.id, late.id]


def test_what_is_computed_again_after_a_preemption_is_not_charged() -> None:
    crowd = Crowd("tenant", num_blocks=12)
    for tenant in ("a", "b", "c"):
        for _ in range(4):
            crowd.add(12, 8, tenant=tenant)
    while crowd.harness.scheduler.has_work():
        crowd.step()
    assert crowd.harness.scheduler.stats.num_preemptions > 0
    counters = crowd.harness.scheduler._waiting["interactive"].counters.tenants.accounts
    lifted = {name: account.counter - crowd.oracle.served[name] for name, account in counters.items()}
    # Nobody was absent for long, so nobody was lifted by much, and what the counters have is what was served.
    assert set(lifted) == set("abc")
    assert 0.0 <= min(lifted.values()) <= max(lifted.values()) < 12.0
