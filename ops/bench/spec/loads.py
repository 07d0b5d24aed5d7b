"""What the bench of speculation serves: prompts whose answers copy, proposers of known quality, timed runs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, fields
from pathlib import Path

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.spec.fixed_depth import FixedDepth
from ops.bench.stepping import engine_of, step_while
from ops.demo_model.heldout import held_out_documents
from shared.sampling import Sampling

_DOCUMENT_TOKENS = 160
_BEGUN_TOKENS = 24


class KnowingProposer:
    """Knows the answers and tells each next token rightly with a set probability: a draft model of known quality."""

    def __init__(self, answers: list[list[int]], acceptance: float, vocab_size: int) -> None:
        """Tell of `answers`, by the number that is the sequence's id."""
        self._answers = answers
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    wants_hidden = False

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the next tokens, some of them changed."""
        return [Draft(self._draft(request.sequence, request.num_tokens)) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: Sequence) -> None:
        """Keep nothing for sequences."""

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        right = self._answers[int(sequence.id)][sequence.num_output_tokens :][:count]
        return tuple(
            token_id if self._random.random() < self._acceptance else (token_id + 1) % self._vocab_size
            for token_id in right
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What one run made while all sequences were decoding: from the last prompt to the first complete answer.

    Attributes:
        seconds: How long that took.
        num_steps: Steps in that time.
        num_tokens: Tokens generated in it.
        answers: The tokens of each sequence.
        num_drafts: Times that a sequence verified drafts, and of these `num_all_right` when none was wrong.
    """

    seconds: float
    num_steps: int
    num_tokens: int
    answers: list[list[int]]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_all_right: int = 0

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.num_steps

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def drafting_share(self) -> float:
        """Share of the times that a sequence was stepped in which it had drafts."""
        return self.num_drafts / max(1, self.num_tokens - self.num_accepted_tokens)

    @property
    def acceptance(self) -> float:
        """Share of right drafts among those that were put to the test: those up to the first wrong one."""
        num_wrong = self.num_drafts - self.num_all_right
        tested = self.num_accepted_tokens + num_wrong
        return self.num_accepted_tokens / tested if tested else 0.0


def together(runs: Values[Run]) -> Run:
    """Return runs, one after another, as one."""
    answers = [answer for run in runs for answer in run.answers]
    names = (field.name for field in fields(Run) if field.name != "answers")
    return Run(answers=answers, **{name: sum(getattr(run, name) for run in runs) for name in names})


class _Counts:
    """A policy that counts what it is told."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._learned: list[tuple[int, int]] = []
        self.may_draft = policy.may_draft
        self.depths = policy.depths
        self.time = policy.time

    @property
    def is_backing_off(self) -> bool:
        return self._policy.is_backing_off

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        self._learned.append((num_drafted, len(accepted)))
        self._policy.learn(sequence, num_drafted, accepted)

    def clear(self) -> None:
        self._learned.clear()

    def taken(self) -> tuple[int, int, int, int]:
        """Return the counts as the last fields of a run."""
        drafted, accepted = (sum(counts[index] for counts in self._learned) for index in (0, 1))
        return len(self._learned), drafted, accepted, sum(a == b for a, b in self._learned)


def serve(
    runner: TorchModelRunner,
    prompts: list[list[int]],
    new: int,
    policy: DraftPolicy | None,
) -> Run:
    """Generate `new` tokens after each prompt, greedily; the runner is made to forget each sequence at the end.

    Raises:
        RuntimeError: A step failed.
    """
    counts = _Counts(FixedDepth(0) if policy is None else policy)
    speculation = None if policy is None else Speculation(counts)
    # The runner's cache serves one engine after another.
    engine = engine_of(runner, max_num_seqs=len(prompts), has_prefix_cache=False, speculation=speculation)
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    sequences = [Sequence(str(i), list(p), len(p), sampling, max_tokens=new) for i, p in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    step_while(engine, lambda: not all(sequence.num_output_tokens for sequence in sequences))
    counts.clear()
    started, first_step, num_before = time.perf_counter(), engine.stats.step, _num_tokens(sequences)
    step_while(engine, lambda: all(sequence.num_output_tokens < new for sequence in sequences))
    seconds, num_steps = time.perf_counter() - started, engine.stats.step - first_step
    num_tokens, taken = _num_tokens(sequences) - num_before, counts.taken()
    step_while(engine, engine.has_work)
    answers = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
    runner.release(sequences)
    return Run(seconds, num_steps, num_tokens, answers, *taken)


def _num_tokens(sequences: list[Sequence]) -> int:
    return sum(sequence.num_output_tokens for sequence in sequences)


def copying_prompts(model: Path, count: int) -> list[list[int]]:
    """Return prompts that show a piece of source code twice and begin it a third time."""
    return [[*piece, *piece, *piece[:_BEGUN_TOKENS]] for piece in beginning_prompts(model, count)]


def copied_prompts(runner: TorchModelRunner, model: Path, new: int, count: int) -> list[list[int]]:
    """Return copying prompts that are answered with a copy: of twice as many, the half that copies longest."""
    prompts = copying_prompts(model, 2 * count)
    runner.verify_drafts_of(None)
    lengths = [_copied(prompt, serve(runner, [prompt], new, None).answers[0]) for prompt in prompts]
    longest = sorted(range(len(prompts)), key=lengths.__getitem__, reverse=True)[:count]
    return [prompts[place] for place in sorted(longest)]


def _copied(prompt: list[int], answer: list[int]) -> int:
    """Count the tokens of an answer up to the first that is not the next of the piece that the prompt begins again."""
    rest = prompt[_BEGUN_TOKENS:_DOCUMENT_TOKENS]
    return next((place for place, pair in enumerate(zip(answer, rest, strict=False)) if pair[0] != pair[1]), len(rest))


def beginning_prompts(model: Path, count: int) -> list[list[int]]:
    """Return pieces of source code, which no training saw, to go on with."""
    tokenizer = ModelTokenizer(read_model_directory(model))
    pieces = []
    for document in held_out_documents():
        token_ids = tokenizer.encode_text(document, add_special_tokens=False)
        pieces += [token_ids[i : i + _DOCUMENT_TOKENS] for i in range(0, len(token_ids), _DOCUMENT_TOKENS)]
    whole = [piece for piece in pieces if len(piece) == _DOCUMENT_TOKENS]
    return random.Random(0).sample(whole, count)


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    generator = random.Random(0)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]
