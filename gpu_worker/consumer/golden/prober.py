"""Replays golden prompts in the engine, as sequences of the batch lane, within a share of the device's time.

One probe scores a short and a long prompt, computed anew, continues the anchor by some decodes, and scores the token
behind each of its blocks, which come from the prefix cache then: from this probe, or from earlier ones while they last.
So each block is looked at by the token right behind it, where a wrong one shows most. The deviation of the probe is the
largest of these, scaled so that all have the limit of whole prompts. Interactive requests never wait for a probe: its
sequences are of the batch lane, and are preempted by them. A probe that is due waits until half of the blocks are free,
so it evicts nothing that others computed. After `PATIENCE_S` it is queued anyway, since a busy worker can be wrong too.

The share is kept by an account. It gains the share of each second that passes, and pays what probes took of the device,
as the scheduler shares out each step. No probe begins while it is overdrawn, but the one that has to confirm a failure:
so after any time all probes have had that share of it at most, and what one probe and its confirmation took.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SequenceEvent
from gpu_worker.engine.engine import EngineStats
from gpu_worker.engine.engine_thread import EngineStoppedError
from shared.errors import BadRequestError
from shared.golden import LONG_TOKENS, Baseline, GoldenPrompt
from shared.golden_statistic import answer_deviation, limit, place_deviation, place_limit, score_deviation, spread
from shared.sampling import Sampling

TIMEOUT_S = 900.0
"""A probe that has not ended by then is given up: people have had the device all that time, or the engine lost it."""
PATIENCE_S = 600.0
"""For how long a probe that is due waits for free blocks."""
MAX_ANCHOR_BLOCKS = 32
_AT_ONCE = 8
"""Sequences of one token that run side by side."""
_TENANT = "golden"
_SALT = b"golden"
"""No request's: those of requests begin with the length of their tenant's name, or with a zero byte."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """Tokens of a sequence at most, by the model's context and the size of the KV cache, and of a block."""

    max_num_tokens: int
    block_size: int


class ProbedEngine(Protocol):
    """What a probe needs of the engine's thread."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence."""


@dataclass(slots=True)
class _Run:
    """One sequence of a probe, what came of it, and how that is compared."""

    sequence: Sequence
    deviation: Callable[[_Run], float]
    scores: list[LogprobEntry] = field(default_factory=list)
    answer: list[LogprobEntry] = field(default_factory=list)


class GoldenProber:
    """Owns the probe under way, its budget, and the counts. Everything is called on the event loop's thread.

    Attributes:
        num_probes: Those that ended with a deviation; `num_failed` of them were over the limit.
        num_given_up: Those that did not end.
        in_a_row: Failures since a probe passed.
        deviation: Of the last probe.
        limit: From which a probe fails.
        device_s: What probes took.
        has_prompts: Whether any prompt fits here; otherwise there are no probes.
    """

    def __init__(
        self,
        engine: ProbedEngine,
        baseline: Baseline,
        share: float,
        clock: Callable[[], float],
        sizes: ProbeSizes,
        judged: Callable[[], None] = lambda: None,
    ) -> None:
        """Take `share` of the device's time.

        Args:
            engine: Where probes run.
            baseline: What to compare with.
            share: From 0 to 1.
            clock: Monotonic seconds.
            sizes: What fits.
            judged: Called after each probe that ended with a deviation.
        """
        self._engine = engine
        self._share = share
        self._clock = clock
        self._judged = judged
        self._answer = baseline.answer
        self._listed = tuple({token_id for likely in baseline.answer for token_id, _ in likely})
        self._anchor = baseline.prompts[0]
        longest = sizes.max_num_tokens - len(self._answer)
        fitting = [prompt for prompt in baseline.prompts if len(prompt.token_ids) <= longest]
        self.has_prompts = bool(fitting)
        self._has_anchor = self._anchor in fitting
        long = [prompt for prompt in fitting if len(prompt.token_ids) >= LONG_TOKENS]
        short = [prompt for prompt in fitting if prompt not in long]
        self._rounds = [itertools.cycle(own) for own in (short, long) if own]
        self._names = itertools.count(1)
        self._block_size = sizes.block_size
        self._unit = spread(self._anchor.logprobs)
        self._stages: Iterator[list[_Run]] = iter(())
        self._runs: dict[str, _Run] = {}
        self._began = self._judged_at = self._paid_until = clock()
        self._due_since: float | None = None
        self._balance_s = 0.0
        self._found = 0.0
        self.limit = limit(baseline.noise)
        self._place_scale = self.limit / place_limit(baseline.place_noise)
        self.num_probes = self.num_failed = self.num_given_up = self.in_a_row = 0
        self.deviation = self.device_s = 0.0

    def tick(self, *, may_begin: bool) -> None:
        """Begin a probe if one is due, and give up one that takes too long. Called every second or so."""
        now = self._clock()
        self._balance_s = min(0.0, self._balance_s + self._share * (now - self._paid_until))
        self._paid_until = now
        if self._runs:
            if now - self._began > TIMEOUT_S:
                self._give_up(f"it did not end within {TIMEOUT_S:g} s")
            return
        if not self.has_prompts or (self._balance_s < 0.0 and self.in_a_row != 1):
            return
        if self._due_since is None:
            self._due_since = now
        if may_begin and (self._has_room() or now - self._due_since >= PATIENCE_S):
            self._began, self._due_since, self._found = now, None, 0.0
            self._stages = self._sequences()
            self._next()

    @property
    def age_s(self) -> float:
        """Seconds since the last probe ended with a deviation, or since the start."""
        return self._clock() - self._judged_at

    def take(self, event: SequenceEvent) -> bool:
        """Take in an event; return whether it is of a probe."""
        run = self._runs.get(event.sequence.id)
        if run is None or event.sequence is not run.sequence:
            return event.sequence.salt == _SALT
        run.scores += event.prompt_logprobs
        run.answer += event.logprobs
        if event.finish == "failed":
            self._give_up(event.error or "its sequence failed")
        elif event.finish is not None:
            del self._runs[event.sequence.id]
            self._pay(run)
            self._found = max(self._found, run.deviation(run))
            if not self._runs:
                self._next()
        return True

    def _sequences(self) -> Iterator[list[_Run]]:
        """Yield the sequences of a probe: those of a list together, once those before have ended."""
        for prompts in self._rounds:
            prompt = next(prompts)
            scored = self._sequence(prompt.token_ids, Sampling(temperature=0.0, prompt_logprobs=0), 0)
            yield [_Run(scored, partial(_score_deviation, prompt))]
        if not self._has_anchor:
            return
        yield [_Run(self._listing(self._anchor.token_ids, self._listed, len(self._answer)), self._answer_deviation)]
        places = range(self._block_size, len(self._anchor.logprobs), self._block_size)[:MAX_ANCHOR_BLOCKS]
        for first in range(0, len(places), _AT_ONCE):
            yield [self._behind(place) for place in places[first : first + _AT_ONCE]]

    def _behind(self, place: int) -> _Run:
        """Score the token that follows `place + 1` tokens of the anchor: all but the last are full blocks."""
        token_ids = self._anchor.token_ids
        return _Run(
            self._listing(token_ids[: place + 1], (token_ids[place + 1],), 1),
            partial(self._place_deviation, self._anchor.logprobs[place]),
        )

    def _listing(self, token_ids: tuple[int, ...], listed: tuple[int, ...], num_tokens: int) -> Sequence:
        """Return a sequence that generates, and reports the log probabilities of `listed`."""
        sampling = Sampling(temperature=0.0, logprobs=1, logprob_token_ids=listed, ignore_eos=True)
        return self._sequence(token_ids, sampling, num_tokens)

    def _sequence(self, token_ids: tuple[int, ...], sampling: Sampling, max_tokens: int) -> Sequence:
        return Sequence(
            id=f"golden-{next(self._names)}",
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            lane="batch",
            arrival=self._clock(),
            tenant=_TENANT,
            salt=_SALT,
            trace="golden",
        )

    def _next(self) -> None:
        runs = next(self._stages, None)
        if runs is None:
            self._judge()
            return
        self._runs = {run.sequence.id: run for run in runs}
        try:
            for run in runs:
                self._engine.add(run.sequence)
        except (BadRequestError, EngineStoppedError) as error:
            self._give_up(str(error))

    def _answer_deviation(self, run: _Run) -> float:
        found = [(entry.token_id, dict(entry.top)) for entry in run.answer]
        return answer_deviation(self._answer, found, self._unit)

    def _place_deviation(self, expected: float, run: _Run) -> float:
        found = [logprob for entry in run.answer for _, logprob in entry.top]
        return self._place_scale * place_deviation(expected, found[0] if found else -math.inf, self._unit)

    def _judge(self) -> None:
        self.num_probes += 1
        self._judged_at = self._clock()
        self.deviation = self._found
        if self._found > self.limit:
            self.num_failed += 1
            self.in_a_row += 1
            told = {"deviation": self._found, "limit": self.limit, "in_a_row": self.in_a_row}
            _log.warning("golden probe failed: the answers are not those of the baseline", extra=told)
        else:
            self.in_a_row = 0
        self._judged()

    def _give_up(self, reason: str) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._engine.abort(run.sequence.id)
            self._pay(run)
        self.num_given_up += 1
        _log.warning("golden probe given up: %s", reason)

    def _pay(self, run: _Run) -> None:
        spent_s = run.sequence.record.device_s
        self.device_s += spent_s
        self._balance_s -= spent_s

    def _has_room(self) -> bool:
        """Whether a slot is free, and half of the blocks are: a probe displaces nothing that others computed."""
        stats = self._engine.stats
        return stats.running < stats.max_num_seqs and 2 * stats.free_blocks >= stats.total_blocks


def _score_deviation(prompt: GoldenPrompt, run: _Run) -> float:
    return score_deviation(prompt.logprobs, [entry.logprob for entry in run.scores])
