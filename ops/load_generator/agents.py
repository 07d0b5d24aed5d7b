"""Conversations of agents as they are known from coding agents: many turns, each a small addition to a long prompt.

In the median a conversation has 43 turns; more than 96 % of the prompts' tokens were in a prompt before. All agents of
a kind begin with the same system prompt and tools; what a turn adds is the result of a tool, or now and then of a
person, who takes longer. Everything follows from the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MEDIAN_TURNS = 43
_SPREAD_OF_TURNS = 0.5
_MAX_TURNS = 160


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a conversation.

    Attributes:
        added_ids: Tokens that it adds to the prompt and the answer of the turn before.
        num_answered: Tokens of its answer.
        pause_s: From the answer before to this request.
    """

    added_ids: list[int]
    num_answered: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class AgentConversation:
    """The turns of one agent; the first one adds the system prompt and the tools."""

    seed: int
    turns: list[AgentTurn]


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """How conversations are drawn. Numbers of tokens are medians.

    Attributes:
        vocabulary: Token ids are below it.
        system_tokens: Of the system prompt and the tools of each kind of agent.
    """

    median_turns: int = MEDIAN_TURNS
    num_kinds: int = 4
    system_tokens: int = 2000
    added_tokens: int = 100
    answered_tokens: int = 40
    tool_pause_s: float = 0.8
    person_pause_s: float = 15.0
    person_share: float = 0.1
    vocabulary: int = 30_000

    def conversations(self, seed: int, count: int) -> list[AgentConversation]:
        """Draw some conversations."""
        draw = random.Random(seed)
        systems = [self._ids(draw, self.system_tokens) for _ in range(self.num_kinds)]
        return [self._conversation(draw, systems[number % self.num_kinds], number) for number in range(count)]

    def _conversation(self, draw: random.Random, system: list[int], number: int) -> AgentConversation:
        num_turns = round(draw.lognormvariate(math.log(self.median_turns), _SPREAD_OF_TURNS))
        turns = [self._turn(draw, system if place == 0 else []) for place in range(max(2, min(_MAX_TURNS, num_turns)))]
        return AgentConversation(number, turns)

    def _turn(self, draw: random.Random, system: list[int]) -> AgentTurn:
        is_person = bool(system) or draw.random() < self.person_share
        pause_s = draw.expovariate(1 / (self.person_pause_s if is_person else self.tool_pause_s))
        added = self._ids(draw, _near(draw, self.added_tokens))
        return AgentTurn([*system, *added], _near(draw, self.answered_tokens), pause_s)

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(self.vocabulary) for _ in range(count)]


def _near(draw: random.Random, median: int) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), 0.6)))
