"""Agents that talk to a virtual fleet: each sends a turn when it has the answer to the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ops.load_generator.agents import AgentConversation
from ops.simulation.fleet import VirtualFleet
from ops.simulation.job import Job
from ops.simulation.outcome import percentile
from shared.messages import Request
from shared.sampling import Sampling


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
        self.fleet.run(lambda: not self._num_busy)

    def one_by_one(self, left_out: int = 0) -> None:
        """Hold one conversation after another, all but the last turns, as many as are `left_out`."""
        for agent in self._agents:
            self._go_on(agent, len(agent.conversation.turns) - left_out, 0.0)
            self.fleet.run(lambda: not self._num_busy)

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
            self.fleet.call_later(delay_s, lambda: self._ask(agent, end))

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
