"""Requests of every combination of factors, what must be answered, and engines that are made to answer them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from functools import cache

import msgspec

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.structured_output.compiled_grammar import CompiledGrammar, compile_grammar
from shared.messages import FinishReason, Lane
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, random_prompt
from tests.gpu_worker.matrix.factors import GRAMMAR, PLAIN, SAMPLINGS, Ask, EngineCell
from tests.gpu_worker.matrix.parts import Models, Parts, make_parts
from tests.gpu_worker.structured_output.tiny_tokenizer import tiny_tokenizer

SHARED = random_prompt(10, seed=99)
EOS = 4
MAX_TOKENS = 10
NUM_BEHIND = 5


@dataclass
class Answer:
    """What the events of a sequence add up to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    num_events: int = 0

    def add(self, event: SequenceEvent, num_before: int) -> None:
        """Take in an event, which has to follow what was streamed so far."""
        assert not self.finishes, "an event came behind the last one"
        assert event.num_tokens_before == num_before + len(self.token_ids), "a token is missing or came twice"
        self.num_events += bool(event.token_ids)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.finish is not None:
            self.finishes.append(event.finish)


@dataclass(frozen=True)
class Choice:
    """One of the sequences of a request."""

    ask: Ask
    number: int
    lane: Lane = "interactive"

    @property
    def name(self) -> str:
        ask = self.ask
        return f"{ask.sampling}, {ask.n} choices, prefix {ask.prefix}, {ask.reports}, {ask.arrival}: {self.number}"

    def sampling(self) -> Sampling:
        options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **SAMPLINGS[self.ask.sampling]}
        reports = {"nothing": {}, "logprobs": {"logprobs": 2}, "prompt_logprobs": {"logprobs": 0, "prompt_logprobs": 1}}
        place = list(SAMPLINGS).index(self.ask.sampling)
        return Sampling(seed=100 * place + self.number, **options, **reports[self.ask.reports])

    def prompt(self) -> list[int]:
        place = list(SAMPLINGS).index(self.ask.sampling)
        own = random_prompt(1 + place, seed=place)
        return [*SHARED, *own] if self.ask.prefix == "hit" else own

    def sequence(
        self, emitted: Iterable[int] = (), prediction: tuple[int, ...] = (), sampling: Sampling | None = None
    ) -> Sequence:
        prompt, sampling = self.prompt(), sampling or self.sampling()
        emitted = tuple(emitted)
        return Sequence(
            self.name,
            [*prompt, *emitted],
            len(prompt),
            sampling,
            max_tokens=sampling.max_tokens or 0,
            eos_token_ids=frozenset({EOS}),
            lane=self.lane,
            prediction=prediction,
            constraint=None if sampling.grammar is None else _compiled().constraint(sampling, emitted),
        )


@cache
def _compiled() -> CompiledGrammar:
    return compile_grammar(GRAMMAR, tiny_tokenizer(VOCAB, frozenset({EOS})))


def choices_of(asks: Iterable[Ask]) -> list[Choice]:
    return [Choice(ask, number) for ask in asks for number in range(int(ask.n))]


class Oracle:
    """What plain decoding answers, each sequence alone in a fresh engine of the same kind."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._known: dict[tuple[object, ...], Answer] = {}

    def answer(self, choice: Choice, cell: EngineCell) -> Answer:
        """Return the answer that a choice has to get."""
        return self._run(choice, cell, choice.sampling())

    def script(self, choice: Choice, cell: EngineCell) -> list[int]:
        """Return the answer's tokens, and what would come behind them if nothing ended it."""
        sampling = choice.sampling()
        endless = msgspec.structs.replace(
            sampling,
            stop_token_ids=(),
            ignore_eos=True,
            max_tokens=(sampling.max_tokens or 0) + NUM_BEHIND,
            prompt_logprobs=None,
        )
        return self._run(choice, cell, endless).token_ids

    def _run(self, choice: Choice, cell: EngineCell, sampling: Sampling) -> Answer:
        # Graphs compute what the device computes without them.
        runner = "host" if cell.runner == "host" else "device"
        key = (runner, cell.kv_cache, choice.ask.prefix, msgspec.msgpack.encode(sampling))
        if key not in self._known:
            alone = EngineCell(PLAIN, runner, cell.kv_cache, "ample", "large", "fixed")
            outcome = Traffic(make_parts(self.models, alone, {}))
            outcome.run([choice.sequence(sampling=sampling)])
            self._known[key] = outcome.answers[choice.name]
        return self._known[key]


class Traffic:
    """Runs an engine, whose clock goes on by the same with every look at it, and collects the answers.

    Attributes:
        num_emitted: Tokens that each sequence came with.
        tolerated: What steps may raise.
    """

    def __init__(self, parts: Parts, tolerated: tuple[type[Exception], ...] = ()) -> None:
        self.parts = parts
        self.tolerated = tolerated
        clock = itertools.count()
        self.engine = Engine(parts.scheduler, parts.runner, lambda: next(clock) * 1e-3)
        self.answers: dict[str, Answer] = {}
        self.sequences: list[Sequence] = []
        self.num_emitted: dict[str, int] = {}

    def run(
        self,
        sequences: Values[Sequence],
        *,
        arrivals_per_step: int = 1000,
        max_steps: int | None = None,
        between_steps: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Answer the sequences, who arrive one after the other, until there is nothing to do, or for some steps."""
        coming = list(sequences)
        for step in itertools.count():
            for sequence in coming[:arrivals_per_step]:
                self._add(sequence)
            del coming[:arrivals_per_step]
            if step == max_steps or not (coming or self.engine.has_work()):
                return
            between_steps(step)
            for event in self.engine.step():
                name = event.sequence.id
                self.answers[name].add(event, self.num_emitted[name])
            if self.engine.last_error is not None and not isinstance(self.engine.last_error, self.tolerated):
                raise self.engine.last_error

    def _add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.answers[sequence.id] = Answer()
        self.num_emitted[sequence.id] = sequence.num_output_tokens
        self.engine.add(sequence)


def emitted_tokens(choice: Choice, whole: Answer) -> list[int]:
    """Return what an earlier attempt has delivered: anything from nothing to the whole answer."""
    if choice.ask.arrival == "fresh":
        return []
    return whole.token_ids[: random.Random(choice.name).randint(0, len(whole.token_ids))]
