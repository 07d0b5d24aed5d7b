"""Speculative decoding beside plain decoding, in the same run: acceptance, speed, and the formula's prediction.

Run as `python -m ops.bench.spec [--model DIR]`. The demo model drafts in every way that it can: prompt
lookup is measured on prompts that begin to repeat a text and are answered with a copy, which the small model does for
about half of them, the others on the beginnings of documents that no training saw. Answers that differ from those of
plain decoding are reported. The depth that adapts has served some batches before it is measured.
The table is printed, and appended to `results/spec.jsonl`.

Source of the formula: Leviathan et al. (arXiv 2211.17192), theorem 3.8: a depth of k with acceptance a makes
(1 - a^(k+1)) / (1 - a) tokens in the time of 1 + k r plain steps, r being what a draft adds to a step, the drafting of
it included.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median

import torch

from gpu_worker.core.adaptive_depth import AdaptiveDepth
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.comparison import median_ratio
from ops.bench.record import ResultTable, add_list, bench_parser, positive
from ops.bench.spec.fixed_depth import FixedDepth
from ops.bench.stepping import engine_of
from ops.demo_model.corpus import held_out_documents
from ops.stack.config import DEMO_MODEL

# Drafts of a sequence where their number does not adapt.
_DEPTH = 4
_LEAST_PROMPTS = 8
"""Small batches are measured on several, one after another: acceptance differs from text to text."""

_LESSONS = 16
"""Batches that the adaptive depth learns from before it is measured: its first trials are not typical of a worker."""

_rate = attrgetter("tokens_per_s")
_PROPOSERS = ["ngram", "draft", "eagle"]
Prompts = list[list[int]]
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


def serve(runner: TorchModelRunner, prompts: list[list[int]], new: int, policy: DraftPolicy | None) -> Run:
    """Generate `new` tokens after each prompt, greedily; the runner is made to forget each sequence at the end.

    Raises:
        RuntimeError: A step failed.
    """
    counted = _Counted(FixedDepth(0) if policy is None else policy)
    # The runner's cache serves one engine after another.
    speculation = None if policy is None else counted
    engine = engine_of(runner, max_num_seqs=len(prompts), enable_prefix_caching=False, speculation=speculation)
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


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft: its proposer, which is loaded once for all runs, and the prompts to measure it on."""

    proposer: Proposer
    prompts: Callable[[int], Prompts]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of a plain run, one of a fixed depth, and one whose depth adapts."""

    plain: list[Run]
    fixed: list[Run]
    adaptive: list[Run]
    depth: int

    def row(self) -> dict[str, object]:
        """Return the figures: medians over the rounds, of ratios within a round."""
        acceptance = median(run.acceptance for run in self.fixed)
        ratio = median(f.step_s / p.step_s for f, p in zip(self.fixed, self.plain, strict=True))
        # Where nothing can be drafted, a step makes one token.
        share = median(run.drafting_share for run in self.fixed)
        accepted = median(run.num_accepted_tokens / max(1, run.num_drafts) for run in self.fixed)
        drafts = median(run.num_draft_tokens / run.num_tokens for run in self.adaptive)
        num_tokens = 1 + share * sum(acceptance**count for count in range(1, self.depth + 1))
        return {
            "plain_tokens_per_s": round(median(run.tokens_per_s for run in self.plain), 1),
            "plain_step_ms": round(median(run.step_s for run in self.plain) * 1e3, 3),
            "depth": self.depth,
            "acceptance": round(acceptance, 3),
            "accepted_per_draft": round(accepted, 2),
            "draft_cost": round((ratio - 1) / self.depth, 3),
            "drafting_share": round(share, 3),
            "fixed_speedup": median_ratio(map(_rate, self.fixed), map(_rate, self.plain)),
            "formula_speedup": round(num_tokens / ratio, 3),
            "adaptive_speedup": median_ratio(map(_rate, self.adaptive), map(_rate, self.plain)),
            "adaptive_drafts_per_token": round(drafts, 2),
        }


def compare(
    runner: TorchModelRunner, way: Way, batches: list[Prompts], new: int, depth: int, rounds: int, lessons: int
) -> Comparison:
    """Serve the same batches of prompts, one after another, each plainly and with drafts.

    Answers that differ are reported: in low precision, a batch of another size may turn a tie of two tokens.

    Raises:
        RuntimeError: A step failed.
    """
    adaptive = AdaptiveDepth(2 * depth)
    policies: tuple[DraftPolicy | None, ...] = (None, FixedDepth(depth), adaptive)

    def served(prompts: Prompts, policy: DraftPolicy | None) -> Run:
        runner.verify_drafts_of(None if policy is None else way.proposer)
        return serve(runner, prompts, new, policy)

    for lesson in range(lessons):
        served(batches[lesson % len(batches)], adaptive)
    orders = list(itertools.permutations(range(len(policies))))
    runs: list[tuple[Run, ...]] = []
    for number in range(rounds):
        parts: tuple[list[Run], ...] = tuple([] for _ in policies)
        for place, prompts in enumerate(batches):
            # One right after the other, so that what else the machine does is the same for all, and in all orders,
            # since a run is slower after one that computes more.
            for index in orders[(number + place) % len(orders)]:
                parts[index].append(served(prompts, policies[index]))
        runs.append(tuple(map(together, parts)))
        plain, *drafted = (run.answers for run in runs[-1])
        for answers in drafted:
            if count := sum(a != b for a, b in zip(answers, plain, strict=True)):
                print(f"{count} of {len(plain)} answers differ from those of plain decoding", file=sys.stderr)
    plain_runs, fixed, adapted = (list(column) for column in zip(*runs, strict=True))
    return Comparison(plain_runs, fixed, adapted, depth)


def _runner_config(model: Path, options: argparse.Namespace) -> RunnerConfig:
    return RunnerConfig(
        model,
        dtype=options.dtype,
        num_blocks=max(options.batch) * 40,
        max_num_seqs=max(options.batch),
        max_model_len=640,
        num_threads=options.num_threads,
    )


def _rows(model: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    runner = build_runner(_runner_config(model, options))
    common = {"dtype": str(runner.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    for name, way in _ways(model, runner, options):
        for batch in options.batch:
            prompts = way.prompts(max(batch, _LEAST_PROMPTS))
            batches = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            result = compare(runner, way, batches, options.new, _DEPTH, options.rounds, _LESSONS)
            yield common | {"model": model.name, "proposer": name, "batch": batch} | result.row()


def _ways(model: Path, runner: TorchModelRunner, options: argparse.Namespace) -> Iterator[tuple[str, Way]]:
    for name in options.proposer:
        trained = name in ("draft", "eagle")
        config = WorkerConfig(model=model, speculative=name, draft_model=model.parent / name if trained else None)
        proposer = build_proposer(config, _runner_config(model, options), runner)
        prompts = partial(beginning_prompts, model)
        if name == "ngram":
            prompts = partial(copied_prompts, runner, model, options.new)
        yield name, Way(proposer, prompts)


def main(arguments: Values[str] | None = None) -> None:
    """Measure, print and record."""
    parser = bench_parser("spec", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="default: the demo model")
    proposers = "what drafts; what draft and eagle draft by lies beside the model, in folders of these names"
    add_list(parser, "--proposer", str, _PROPOSERS, proposers, _PROPOSERS)
    add_list(parser, "--batch", positive, [1, 4, 16, 32], "sequences at once: 1,4,16,32")
    parser.add_argument("--new", type=positive, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=positive, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=positive, help="of CPU operations; as of a worker if not given")
    options = parser.parse_args(arguments)
    table = ResultTable("spec")
    for row in _rows(options.model, options):
        table.add(row)


if __name__ == "__main__":
    main()
