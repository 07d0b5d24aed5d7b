"""What the bench of speculation serves: prompts whose answers copy, and timed runs."""

from __future__ import annotations

import random
from collections.abc import Sequence as Values
from dataclasses import dataclass, fields
from pathlib import Path

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.spec.fixed_depth import FixedDepth
from ops.bench.stepping import engine_of
from ops.demo_model.corpus import held_out_documents

_DOCUMENT_TOKENS = 160
_BEGUN_TOKENS = 24


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


class _Counted(Speculation):
    """Counts too how often no draft was wrong."""

    num_all_right = 0

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        super().record(sequence, num_drafted, num_accepted)
        self.num_all_right += 0 < num_drafted == num_accepted

    def counts(self) -> tuple[int, int, int, int]:
        """Return the last fields of a run."""
        return self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, self.num_all_right


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
    counted = _Counted(FixedDepth(0) if policy is None else policy)
    # The runner's cache serves one engine after another.
    speculation = None if policy is None else counted
    engine = engine_of(runner, max_num_seqs=len(prompts), has_prefix_cache=False, speculation=speculation)
    sequences = [engine.add(prompt, new) for prompt in prompts]
    engine.prefill(sequences)
    first_step, num_before, counts = engine.engine.stats.step, _num_tokens(sequences), counted.counts()
    seconds = engine.step_while(lambda: all(sequence.num_output_tokens < new for sequence in sequences))
    num_steps = engine.engine.stats.step - first_step
    num_tokens = _num_tokens(sequences) - num_before
    taken = (after - before for after, before in zip(counted.counts(), counts, strict=True))
    engine.run()
    answers = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
    runner.clear()
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
