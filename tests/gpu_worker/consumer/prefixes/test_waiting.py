"""Workers that wait for prefixes, in virtual time: what holds whatever is lost, late or false."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.consumer.prefixes.held import prefix_chain
from gpu_worker.consumer.prefixes.messages import Answer, Offer, PeerMessage, Reply
from gpu_worker.consumer.prefixes.peers import UNRELIABLE_IN_VAIN, PeerBeat
from gpu_worker.consumer.prefixes.waiting import ANSWER_S
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_reader import cache_salt
from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.load_generator.agents import AgentConversation, AgentLoad, AgentTurn
from ops.simulation.fleet import VirtualFleet
from ops.simulation.outcome import Job, percentile
from ops.simulation.step_time import LinearTimes, StepTimes
from ops.simulation.worker import VirtualWorker
from shared.adapter_calls import pack_residents
from shared.messages import Request
from shared.prefixes import MAX_WAIT_S, PrefixNews
from shared.sampling import Sampling

LOAD = AgentLoad(median_turns=6, system_tokens=1000, answered_tokens=10, tool_pause_s=0.3, person_pause_s=1.0)
STEP_MS, GROWTH = 6.0, 0.02


def growing_times(growth: float) -> StepTimes:
    """Return steps to which every further token adds the share `growth`."""
    fixed_s = STEP_MS / 1000
    return StepTimes(LinearTimes(fixed_s * (1 - growth), token_s=fixed_s * growth))


TIMES = growing_times(GROWTH)
# Of a step that is as full as it may be.
PREFILL_RATE = 512 / (STEP_MS / 1e3 * (1 + GROWTH * 511))


@dataclass(slots=True)
class _Agent:
    conversation: AgentConversation
    prompt: list[int] = field(default_factory=list)
    place: int = 0


class AgentRun:
    """Conversations on one fleet.

    Attributes:
        jobs: All requests so far.
    """

    def __init__(self, fleet: VirtualFleet, conversations: Sequence[AgentConversation], tenant: str = "t") -> None:
        """Begin nothing yet."""
        self.fleet = fleet
        self.jobs: list[Job] = []
        self._tenant = tenant
        self._agents = [_Agent(conversation) for conversation in conversations]
        self._num_busy = 0

    def together(self, gap_s: float) -> None:
        """Hold all conversations, each begun `gap_s` seconds after the one before."""
        for number, agent in enumerate(self._agents):
            self._go_on(agent, len(agent.conversation.turns), number * gap_s)
        self.fleet.clock.run(lambda: not self._num_busy)

    def one_by_one(self, left_out: int = 0) -> None:
        """Hold one conversation after another, all but the last turns, as many as are `left_out`."""
        for agent in self._agents:
            self._go_on(agent, len(agent.conversation.turns) - left_out, 0.0)
            self.fleet.clock.run(lambda: not self._num_busy)

    def ttft_ms(self, percent: int) -> float:
        """Return a percentile of the times to first token."""
        times = [job.first_s for job in self.jobs if job.first_s is not None]
        return round(1e3 * percentile(times, percent), 2)

    def hit_rate(self, since: int = 0) -> float:
        """Return the share of the prompts' tokens that was cached, of the requests from number `since` on."""
        jobs = self.jobs[since:]
        return sum(job.num_cached for job in jobs) / max(1, sum(job.num_prompt for job in jobs))

    def _go_on(self, agent: _Agent, end: int, delay_s: float) -> None:
        if agent.place < end:
            self._num_busy += 1
            self.fleet.clock.call_later(delay_s, lambda: self._ask(agent, end))

    def _ask(self, agent: _Agent, end: int) -> None:
        turn = agent.conversation.turns[agent.place]
        agent.prompt += turn.added_ids
        sampling = Sampling(max_tokens=turn.num_answered, ignore_eos=True, seed=agent.conversation.seed)
        request = Request(
            id=f"{agent.conversation.seed}-{agent.place}",
            model="m",
            tenant=self._tenant,
            token_ids=tuple(agent.prompt),
            sampling=sampling,
        )

        def answered(token_ids: list[int]) -> None:
            self._num_busy -= 1
            agent.prompt += token_ids
            agent.place += 1
            if agent.place < end:
                self._go_on(agent, end, agent.conversation.turns[agent.place].pause_s)

        job = Job(request, answered)
        self.jobs.append(job)
        self.fleet.submit(job)


def config(num_blocks: int = 600, max_num_seqs: int = 4, budget: int = 512) -> SchedulerConfig:
    return SchedulerConfig(16, num_blocks, max_num_seqs, budget, 8192)


def fleet(
    num_workers: int = 3, *, is_affine: bool = True, num_blocks: int = 600, max_num_seqs: int = 4, budget: int = 512
) -> VirtualFleet:
    return VirtualFleet(num_workers, config(num_blocks, max_num_seqs, budget), TIMES, is_affine=is_affine)


def answers(run: AgentRun) -> list[tuple[str, bool]]:
    return sorted((job.request.id, job.is_done) for job in run.jobs)


def watch(watched: VirtualFleet, check: Callable[[], None]) -> None:
    """Check something every twentieth of a second."""

    def again() -> None:
        check()
        watched.clock.call_later(0.05, again)

    again()


# With the second, no step is full, so that none shows how many tokens a worker computes in a second.
@pytest.mark.parametrize("budget", [512, 8192])
def test_turns_find_their_prefix_as_in_one_worker_with_all_memory(budget: int) -> None:
    conversations = LOAD.conversations(1, 12)
    pull, wait = (AgentRun(fleet(is_affine=each, budget=budget), conversations) for each in (False, True))
    one = VirtualFleet(1, config(3 * 600, 12, budget), growing_times(GROWTH / 3), is_affine=False)
    alone = AgentRun(one, conversations)
    for run in (pull, wait, alone):
        run.together(0.5)
    # Each worker computes the agents' four system prompts once.
    assert wait.hit_rate() >= 0.85 * alone.hit_rate()
    assert 1 - wait.hit_rate() < 0.7 * (1 - pull.hit_rate())
    # With the second budget, one of the 77 waits long in vain.
    percent = 99 if budget == 512 else 90
    assert wait.ttft_ms(percent) <= pull.ttft_ms(percent)
    assert answers(wait) == answers(pull)


def test_unrelated_prompts_are_served_as_by_pulling_alone() -> None:
    draw = random.Random(5)
    turns = [AgentTurn([number, *draw.choices(range(1000), k=600)], 8, 0.0) for number in range(60)]
    conversations = [AgentConversation(number, [turn]) for number, turn in enumerate(turns)]
    runs = [AgentRun(fleet(is_affine=is_affine), conversations) for is_affine in (False, True)]
    for run in runs:
        run.together(0.02)
    pull, wait = ([(job.first_s, job.workers) for job in run.jobs] for run in runs)
    assert wait == pull


def test_new_conversations_spread_over_the_memory_of_all_workers() -> None:
    load = AgentLoad(median_turns=4, num_kinds=1, system_tokens=1000, answered_tokens=10, added_tokens=200)
    served = fleet(num_blocks=1000)
    run = AgentRun(served, load.conversations(3, 24))
    run.one_by_one(left_out=1)
    before = len(run.jobs)
    # They need far more than the memory of one or two workers.
    used = [worker.stats.total_blocks - worker.num_blank_blocks for worker in served.workers]
    assert min(used) > 0.5 * max(used)
    run.one_by_one()
    assert run.hit_rate(before) > 0.85


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from((0.1, 0.5, 1.0)))
def test_loss_of_announcements_and_messages_costs_no_request(seed: int, share: float) -> None:
    draw = random.Random(seed)
    lossy = VirtualFleet(3, config(), TIMES, is_affine=True, is_lost=lambda what: draw.random() < share)
    conversations = LOAD.conversations(seed, 6)
    run, pull = AgentRun(lossy, conversations), AgentRun(fleet(is_affine=False), conversations)
    run.together(0.2)
    pull.together(0.2)
    assert answers(run) == answers(pull)
    if share == 1.0:
        assert [job.first_s for job in run.jobs] == [job.first_s for job in pull.jobs]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_no_worker_with_room_lets_work_wait_that_is_older_than_its_prefix_saves(seed: int) -> None:
    busy = fleet(2, num_blocks=520, max_num_seqs=2)
    run = AgentRun(busy, LOAD.conversations(seed, 12))

    def check() -> None:
        has_room = any(worker.capacity.interactive(0) > 0 for worker in busy.workers)
        for job in run.jobs:
            longest_s = len(job.request.token_ids or ()) / PREFILL_RATE * 1.3 + ANSWER_S
            assert job.workers or not has_room or busy.now - job.sent_at <= longest_s

    watch(busy, check)
    run.together(0.05)
    assert sum(worker.waiting.num_granted for worker in busy.workers) > 0


class LyingFleet(VirtualFleet):
    """A fleet that hears of a worker that says to hold whatever was asked for, and replies to offers as it is told."""

    reply: Reply | None = None

    def lie(self, links: Sequence[bytes]) -> None:
        for worker in self.workers:
            worker.others.note(
                PeerBeat(worker="liar", prefill_rate=1e3, prefixes=PrefixNews(b"".join(links[-1000:]))), self.now
            )

    def send(self, receiver: str, message: PeerMessage) -> None:
        if receiver != "liar":
            super().send(receiver, message)
        elif isinstance(message, Offer) and self.reply is not None:
            super().send(message.worker, Answer("liar", message.number, self.reply))


@pytest.mark.parametrize(
    "reply", [None, "claim", "later", *(pytest.param(reply, marks=pytest.mark.slow) for reply in ("decline", "taken"))]
)
def test_worker_that_announces_falsely_delays_others_no_longer_than_the_prefix_would_save(reply: Reply | None) -> None:
    conversations = LOAD.conversations(2, 6)
    served = LyingFleet(2, config(), TIMES, is_affine=True)
    served.reply = reply
    run = AgentRun(served, conversations)

    def lie() -> None:
        chains = [prefix_chain(job.request, cache_salt(job.request)) for job in run.jobs]
        served.lie([link for chain in chains if chain is not None for link in chain.links])

    watch(served, lie)
    run.together(0.2)
    for job in run.jobs:
        # Its turn, one before it, and the wait.
        longest_s = len(job.request.token_ids or ()) / PREFILL_RATE
        assert job.is_done
        assert job.first_s is not None
        assert job.first_s <= min(longest_s, MAX_WAIT_S) * 4 + ANSWER_S + 0.3


def test_worker_that_always_says_later_is_not_waited_for_after_a_few_times() -> None:
    served = LyingFleet(2, config(), TIMES, is_affine=True)
    served.reply = "later"
    seconds = []
    for number in range(3 * int(UNRELIABLE_IN_VAIN)):
        job = long_job(number)
        chain = prefix_chain(job.request, cache_salt(job.request))
        assert chain is not None
        served.lie(chain.links)
        asked_at = served.now
        serve(served, job)
        assert job.first_s is not None
        seconds.append(served.now - asked_at)
    num_delayed = sum(each > 1.5 * min(seconds) for each in seconds)
    assert 1 <= num_delayed <= UNRELIABLE_IN_VAIN + 1, seconds


def test_requests_of_a_worker_that_dies_or_drains_are_served_by_others() -> None:
    served = fleet(4)
    run = AgentRun(served, LOAD.conversations(4, 12))
    served.clock.call_later(2.0, served.workers[0].die)
    served.clock.call_later(3.0, served.workers[1].drain)
    run.together(0.2)
    assert all(is_done for _, is_done in answers(run))
    assert run.hit_rate() > 0.5


def test_tenants_do_not_wait_for_one_anothers_prefixes() -> None:
    served = fleet()
    conversations = LOAD.conversations(6, 1)
    AgentRun(served, conversations, tenant="a").together(0.0)
    other = AgentRun(served, conversations, tenant="b")
    other.one_by_one(left_out=len(conversations[0].turns) - 1)
    assert other.hit_rate() == 0.0
    assert other.jobs[0].workers
    assert other.ttft_ms(50) < 1e3 * len(other.jobs[0].request.token_ids or ()) / PREFILL_RATE + 100


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"deadline": 10.0}, True),
        # Without the prefix, computing the prompt takes all the time there is.
        ({"deadline": 0.1}, False),
        ({"emitted": (1, 2)}, False),
        ({"epoch": 1}, False),
        ({"probation": 1}, False),
        ({"tenant": "other"}, False),
    ],
)
def test_request_waits_only_if_it_is_new_and_its_deadline_allows(changes: dict[str, Any], waits: bool) -> None:
    served = fleet(2)
    run = AgentRun(served, LOAD.conversations(7, 1))
    run.together(0.0)
    served.clock.run(lambda: False, until=served.now + 2.0)
    last = run.jobs[-1]
    (holder,) = set(last.workers)
    (puller,) = (worker for worker in served.workers if worker.name != holder)
    fields: dict[str, Any] = {"token_ids": last.request.token_ids, "tenant": "t", **changes}
    if "deadline" in fields:
        fields["deadline"] += served.now
    request = Request(id="again", model="m", **fields)
    message = QueuedMessage("", b"", "", 1, 1, 0, stored_at=served.now)
    assert puller.waiting.take(message, request, prefix_chain(request, cache_salt(request))) is waits


DIGEST = "1" * 64


@dataclass
class _Adapters:
    """The adapters of a worker: which are in memory, and how long a load takes."""

    load_s: float = 0.0
    residents: tuple[str, ...] = ()

    def is_resident(self, digest: str) -> bool:
        return digest in self.residents


def list_adapter(served: VirtualFleet, holder: VirtualWorker) -> None:
    """Let a worker have an adapter in memory, of which all others have heard."""
    holder.waiting._adapters = holder.claims._adapters = _Adapters(0.5, (DIGEST,))
    for worker in served.workers:
        peer = worker.others._peers.get(holder.name)
        if peer is not None:
            peer.adapters = pack_residents([DIGEST])


def begin_at(served: VirtualFleet, puller: VirtualWorker, request: Request) -> list[tuple[str, float]]:
    """Let a worker pull a request; return where it begins, and after how many seconds."""
    begun: list[tuple[str, float]] = []
    started = served.now
    for worker in served.workers:

        def begin(message: QueuedMessage, name: str = worker.name) -> None:
            begun.append((name, round(served.now - started, 2)))

        worker.claims.start(begin)
        worker.waiting.start(begin, lambda message: None, lambda: None)
    message = QueuedMessage("s", b"", "$JS.ACK.a.b.1.9.1.0.0", 9, 1, 0, stored_at=started)
    if not puller.waiting.take(message, request, prefix_chain(request, cache_salt(request))):
        begun.append((puller.name, 0.0))
    served.clock.run(lambda: bool(begun), until=started + 2.0)
    return begun


@pytest.mark.parametrize(
    ("load_s", "own", "named", "granted"),
    [
        (0.5, (), DIGEST, True),
        # Nothing to load here, no load was measured yet, or nobody has it.
        (0.5, (DIGEST,), DIGEST, False),
        (0.0, (), DIGEST, False),
        (0.5, (), "2" * 64, False),
        (0.5, (), "a name", False),
        (0.5, (), None, False),
    ],
)
def test_request_goes_to_the_worker_that_has_its_adapter_in_memory(
    load_s: float, own: tuple[str, ...], named: str | None, granted: bool
) -> None:
    served = fleet(2)
    puller, holder = served.workers
    puller.waiting._adapters = _Adapters(load_s, own)
    list_adapter(served, holder)
    request = Request(id="r", model="m", token_ids=(1, 2, 3), adapter=named)
    assert begin_at(served, puller, request) == [(holder.name if granted else puller.name, 0.0)]


def long_job(number: int, common: int = 0, adapter: str | None = None, length: int = 2000) -> Job:
    """Return a request of 2,000 tokens or `length`, the first `common` of which all such requests share."""
    token_ids = (
        *random.Random(0).choices(range(1000), k=common),
        *random.Random(number).choices(range(1000), k=length),
    )
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    request = Request(
        id=str(number), model="m", tenant="t", token_ids=token_ids[:length], adapter=adapter, sampling=sampling
    )
    return Job(request, lambda token_ids: None)


def serve(served: VirtualFleet, *jobs: Job) -> VirtualWorker:
    """Serve requests one by one, until all workers know of it; return the worker of the last one."""
    for job in jobs:
        served.submit(job)
        served.clock.run(lambda job=job: job.is_done)  # type: ignore[misc]
        served.clock.run(lambda: False, until=served.now + 2.0)
    return next(worker for worker in served.workers if worker.name in jobs[-1].workers)


# It is asked before it has told of that, and after.
@pytest.mark.parametrize("passed_s", [0.0, 2.0])
def test_worker_that_has_evicted_the_end_of_a_prompt_is_asked_for_its_beginning(passed_s: float) -> None:
    served, request = fleet(2), long_job(1).request
    holder = serve(served, long_job(1))
    (puller,) = (worker for worker in served.workers if worker is not holder)
    chain = prefix_chain(request, cache_salt(request))
    assert chain is not None
    for link in chain.links[1:]:
        holder.engine.scheduler._blocks.pool.forget(holder.prefixes._noted[link].block)
    served.clock.run(lambda: False, until=served.now + passed_s)
    assert begin_at(served, puller, request) == [(holder.name, 0.0)]


@pytest.mark.parametrize(
    ("listing", "num_running", "expected"),
    [
        # Both others are emptier than the puller, and the one with the adapter runs a request.
        ("holder", 1, ("holder", 0.0)),
        # It has no room all the time: the request is loaded where it is.
        ("holder", 1000, ("puller", 0.5)),
        ("puller", 0, ("puller", 0.0)),
        # Nobody has it: empty memory decides.
        (None, 1, ("other", 0.0)),
    ],
)
def test_empty_memory_draws_no_request_away_from_its_adapter(
    listing: str | None, num_running: int, expected: tuple[str, float]
) -> None:
    served = fleet(3)
    puller = serve(served, long_job(1, length=8000))
    holder, other = (worker for worker in served.workers if worker is not puller)
    named = {"puller": puller, "holder": holder, "other": other}
    for worker in served.workers:
        worker.waiting._adapters = worker.claims._adapters = _Adapters(0.5)
    if listing is not None:
        list_adapter(served, named[listing])
    holder.capacity.reserve(num_running)
    name, after_s = expected
    assert begin_at(served, puller, long_job(3, adapter=DIGEST).request) == [(named[name].name, after_s)]


def test_worker_with_the_adapter_and_a_common_beginning_claims_though_it_runs_more() -> None:
    served = fleet(3)
    holder, puller, other = served.workers
    puller.held.is_withdrawn = other.held.is_withdrawn = True
    serve(served, *(long_job(number, common=1000, adapter=DIGEST) for number in (1, 2)))
    puller.held.is_withdrawn = other.held.is_withdrawn = False
    puller.waiting._adapters = _Adapters(0.5)
    list_adapter(served, holder)
    holder.capacity.reserve(1)
    assert begin_at(served, puller, long_job(3, common=1000, adapter=DIGEST).request) == [(holder.name, 0.0)]


def test_workers_that_announce_an_adapter_and_take_nothing_do_not_keep_its_holder_from_being_asked() -> None:
    served = fleet(5)
    puller, holder, *liars = served.workers
    puller.waiting._adapters = _Adapters(0.5)
    for liar in liars:
        liar.capacity.reserve(1000)
    request = Request(id="r", model="m", token_ids=(1, 2, 3), adapter=DIGEST)
    for expected in ((puller.name, 0.5), (holder.name, 0.0)):
        for worker in (holder, *liars):
            list_adapter(served, worker)
        for liar in liars:
            # They say that they are empty, and will have room later.
            puller.others._peers[liar.name].num_blank = 10_000
        assert begin_at(served, puller, request) == [expected]
