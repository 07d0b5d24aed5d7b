"""A trace of agents, drawn by a seed: turns with tools and pauses, subagents, contexts that are compacted, ends.

An agent's prompt is its kind's system prompt, then the conversation. Each turn adds the answer and the result of a
tool, and comes after a pause: short for most tools, minutes for builds and people. A turn may start a subagent, whose
conversation is another one, and waits for its end. A context that has grown too long is replaced by a summary. Agents
say what they know in hints, or say nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ops.simulation.engine import TOKEN_ID
from ops.simulation.workload import ANSWER, Arrival
from shared.cache_hints import CacheHints

_SUBAGENT_TURNS = 4
_ANSWER_S = 4.0
"""What an agent counts for an answer before the next pause begins."""


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """Agents of one tenant.

    Attributes:
        sessions: Conversations that a person starts; subagents come on top.
        rate: Of these, each second.
        kinds: Of agents, each with a system prompt of its own.
        system: Tokens of a system prompt.
        turns: Of a conversation, in the mean.
        grows: Tokens of a tool's result, in the mean.
        output: Tokens of an answer, in the mean.
        pause_s: Median of short pauses; one in `long_every` lasts twenty times as long.
        compacts_at: Tokens of a context from which it is replaced by a summary of an eighth.
        subagent_share: Of turns that start a subagent.
        retain_s: What agents ask for between turns.
    """

    sessions: int = 60
    rate: float = 1.0
    kinds: int = 3
    system: int = 1024
    turns: int = 12
    grows: int = 300
    output: int = 24
    pause_s: float = 3.0
    long_every: int = 6
    compacts_at: int = 4_000
    subagent_share: float = 0.08
    retain_s: float = 300.0

    def arrivals(self, seed: int, *, has_hints: bool) -> Iterator[Arrival]:
        """Draw all requests, in the order of their times; hints change nothing but themselves."""
        draw = random.Random(f"agents/{seed}")
        texts = itertools.count(self.kinds)
        conversations = []
        at = 0.0
        for number in range(self.sessions):
            turns = draw.randint(2, 2 * self.turns)
            conversations += _Conversation(self, draw, texts, f"s{number}", turns).run(at)
            at += draw.expovariate(self.rate)
        for arrival in sorted(conversations, key=lambda each: each.at):
            yield arrival if has_hints else replace(arrival, hints=None)


class _Conversation:
    def __init__(
        self, trace: AgentTrace, draw: random.Random, texts: Iterator[int], name: str, turns: int, depth: int = 0
    ) -> None:
        self._trace = trace
        self._draw = draw
        self._texts = texts
        self._name = name
        self._turns = turns
        self._depth = depth
        self._said: list[tuple[int, int]] = [(draw.randrange(trace.kinds), trace.system)]
        self._system = self._said[0]
        self._arrivals: list[Arrival] = []

    def run(self, at: float) -> list[Arrival]:
        self._say(self._length(self._trace.grows))
        for turn in range(self._turns):
            is_last = turn == self._turns - 1
            output = self._length(self._trace.output)
            self._ask(at, output, is_last=is_last)
            self._said.append((ANSWER, output))
            at = self._wait(at + _ANSWER_S)
            if not is_last and self._depth == 0 and self._draw.random() < self._trace.subagent_share:
                at = self._delegate(at)
            if self._num_tokens > self._trace.compacts_at:
                self._said = [self._system]
                self._say(self._trace.compacts_at // 8)
            self._say(self._length(self._trace.grows))
        return self._arrivals

    @property
    def _num_tokens(self) -> int:
        return sum(length for _, length in self._said)

    def _ask(self, at: float, output: int, *, is_last: bool) -> None:
        hints = CacheHints(
            session_id=self._name, supersedes=True, retain_s=0.0 if is_last else self._trace.retain_s, drop=is_last
        )
        said = tuple(self._said)
        self._arrivals.append(Arrival(at, self._num_tokens, output, beginnings=said, hints=hints))

    def _delegate(self, at: float) -> float:
        name = f"{self._name}.{len(self._arrivals)}"
        turns = self._draw.randint(2, 2 * _SUBAGENT_TURNS)
        delegated = _Conversation(self._trace, self._draw, self._texts, name, turns, self._depth + 1).run(at)
        self._arrivals += delegated
        return self._wait(delegated[-1].at + _ANSWER_S)

    def _say(self, length: int) -> None:
        self._said.append((next(self._texts), length))

    def _wait(self, at: float) -> float:
        pause_s = self._draw.lognormvariate(math.log(self._trace.pause_s), 0.8)
        return at + pause_s * (20 if self._draw.randrange(self._trace.long_every) == 0 else 1)

    def _length(self, mean: int) -> int:
        return max(1, round(self._draw.lognormvariate(math.log(mean) - 0.32, 0.8)))


def oracle_hits(arrivals: list[Arrival], block_size: int) -> int:
    """Return the prompt tokens that are cached where memory has no bounds, and all workers share it at once.

    Whatever an earlier request has computed is found, also if it has not ended yet.
    """
    known: set[int] = set()
    num_hits = 0
    for number, arrival in enumerate(arrivals, start=1):
        ids = arrival.token_ids(number)
        ids += itertools.repeat(TOKEN_ID, arrival.output)
        parent, is_known = 0, True
        for place in range((len(ids) - 1) // block_size):
            end = (place + 1) * block_size
            parent = hash((parent, *ids[end - block_size : end]))
            is_known = is_known and parent in known
            num_hits += block_size * (is_known and end < arrival.prompt)
            known.add(parent)
    return num_hits
