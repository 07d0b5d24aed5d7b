"""The watermark on texts of a model: detection, false positives, perplexity, and detection of edited texts.

Run as `python -m ops.bench.watermark`, which also writes the plot of `ops/docs/watermark.md`. The engine alone samples
the demo model, or `--model`, at temperature 1: as many texts with a watermark, each by a key of its own, as without.
Prompts are random tokens; detectors see the output alone.
With `--corpus` it counts false positives alone: of the text files below a directory, cut into distinct texts.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from kernels.sampling import SamplingParameters, sample_tokens
from ops.bench.record import ResultTable, bench_parser, positive
from ops.bench.stepping import make_engine
from ops.chart import Line, line_chart, picture
from ops.stack.config import DEMO_MODEL
from ops.watermark import log_gamma_tail, scores

PLOT = Path(__file__).parents[1] / "docs" / "assets" / "watermark-edits.svg"
PROMPT_TOKENS = 8
BATCH = 128
EDITS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
LENGTHS = (25, 50, 100, 200)
LEVELS = (1e-2, 1e-3, 1e-4, 1e-5)
COLUMNS = ("measure", "at", "value")
_TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
_PAIRS_AT_ONCE = 500
_NUM_MARKS, _NUM_CONTEXT_TEXTS = 500, 16


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the model, its key (None without a watermark), and the sum of its tokens' log probabilities."""

    token_ids: list[int]
    key: str | None
    logprob: float


class Writer:
    """Owns an engine that writes texts of `length` tokens."""

    def __init__(self, model: Path, length: int) -> None:
        self._length = length
        max_len = PROMPT_TOKENS + length + 10
        config = RunnerConfig(model, "float32", max_num_seqs=BATCH, max_model_len=max_len, num_threads=2)
        self._engine = make_engine(config)
        self.vocab_size = self._engine.runner.model_config.vocab_size
        self._random = random.Random(1)
        self.seconds = {True: 0.0, False: 0.0}

    def write(self, count: int, *, is_marked: bool) -> list[Text]:
        """Generate `count` texts, one batch at a time."""
        texts: list[Text] = []
        while len(texts) < count:
            began = time.thread_time()
            texts += self._batch(min(BATCH, count - len(texts)), is_marked=is_marked)
            self.seconds[is_marked] += time.thread_time() - began
        return texts

    def distributions(self) -> torch.Tensor:
        """Return the logarithms of all tokens' probabilities behind each place of some unmarked texts.

        Shapes:
            result: `[num_contexts, vocab_size]` float32
        """
        rows: list[torch.Tensor] = []
        for _ in range(_NUM_CONTEXT_TEXTS):
            self._sequence(is_marked=False, num_top=self.vocab_size)
        for event in self._engine.events():
            for entry in event.logprobs:
                ids, values = zip(*entry.top, strict=True)
                rows.append(torch.empty(self.vocab_size).scatter_(0, torch.tensor(ids), torch.tensor(values)))
        return torch.stack(rows)

    def _batch(self, count: int, *, is_marked: bool) -> Iterator[Text]:
        sequences = [self._sequence(is_marked=is_marked) for _ in range(count)]
        logprobs = {sequence.id: 0.0 for sequence in sequences}
        for event in self._engine.events():
            logprobs[event.sequence.id] += math.fsum(entry.logprob for entry in event.logprobs)
        for each in sequences:
            output = each.token_ids[each.num_prompt_tokens :]
            yield Text(output, each.sampling.watermark, logprobs[each.id])

    def _sequence(self, *, is_marked: bool, num_top: int = 0) -> Sequence:
        key = self._random.randbytes(32).hex() if is_marked else None
        asked = {"temperature": 1.0, "seed": self._random.getrandbits(62), "logprobs": num_top, "watermark": key}
        return self._engine.add(self._engine.random_prompt(PROMPT_TOKENS), self._length, **asked)


def auc(marked: Values[float], plain: Values[float]) -> float:
    """Return the probability that a marked text's logarithm of p is lower than that of another; a tie counts half."""
    ranks = sorted([(value, True) for value in marked] + [(value, False) for value in plain])
    wins, num_plain_above = 0.0, len(plain)
    for _, is_marked in ranks:
        if is_marked:
            wins += num_plain_above
        else:
            num_plain_above -= 1
    return wins / (len(marked) * len(plain))


def edited(token_ids: list[int], share: float, vocab_size: int, source: random.Random) -> list[int]:
    """Return a text in which a share of the tokens, anywhere, are replaced by random ones."""
    changed = list(token_ids)
    for place in source.sample(range(len(changed)), round(share * len(changed))):
        changed[place] = source.randrange(vocab_size)
    return changed


def _logarithms(texts: Iterable[tuple[Values[int], bytes]]) -> list[float]:
    """Return the logarithm to base 10 of each text's p-value."""
    counts, sums = scores(texts)
    return [log_gamma_tail(int(n), float(score)) / math.log(10.0) for n, score in zip(counts, sums, strict=True)]


def _edited_texts(texts: Values[Text], share: float, length: int, vocab_size: int) -> Iterator[tuple[list[int], bytes]]:
    source = random.Random(2)
    for text in texts:
        assert text.key is not None
        yield edited(text.token_ids[:length], share, vocab_size, source), bytes.fromhex(text.key)


def corpus_texts(directory: Path, model: Path, length: int) -> Iterator[list[int]]:
    """Yield the texts of `length` tokens, each once, that the UTF-8 files below a directory have."""
    tokenizer, seen = ModelTokenizer(read_model_directory(model)), set()
    for path in sorted(path for path in directory.rglob("*") if path.suffix in _TEXT_SUFFIXES and path.is_file()):
        token_ids = tokenizer.encode_text(path.read_text("utf-8", "ignore"), add_special_tokens=False)
        for first in range(0, len(token_ids) - length + 1, length):
            text = token_ids[first : first + length]
            if (digest := hash(tuple(text))) not in seen:
                seen.add(digest)
                yield text


def tell_false_positives(table: ResultTable, texts: Iterable[list[int]], length: int) -> None:
    """Count unmarked texts, each with a random key, and their p-values at or below each level; print and record it.

    The p-values are those of torch's regularized incomplete Gamma function, not the detector's own sum.
    """
    source, found, num_texts, rest = random.Random(3), dict.fromkeys(LEVELS, 0), 0, iter(texts)
    while some := list(itertools.islice(rest, _PAIRS_AT_ONCE)):
        num_texts += len(some)
        counts, sums = scores((text, source.randbytes(32)) for text in some)
        tails = torch.special.gammaincc(counts.double(), sums)
        for level in LEVELS:
            found[level] += int((tails <= level).sum())
    for level, count in found.items():
        row = {"measure": f"false positives of {num_texts}", "at": f"p <= {level:g}", "value": count}
        table.add(row, texts=num_texts, length=length)


def _perplexity(texts: Values[Text]) -> tuple[float, float]:
    """Return the perplexity of texts under the model, and the standard error of its logarithm."""
    nats = [-text.logprob / len(text.token_ids) for text in texts]
    mean = math.fsum(nats) / len(nats)
    variance = math.fsum((each - mean) ** 2 for each in nats) / max(1, len(nats) - 1)
    return math.exp(mean), math.sqrt(variance / len(nats))


def perplexity_of_draws(logprobs: torch.Tensor, num_marks: int) -> tuple[float, float, float]:
    """Draw from distributions of the model under many marks each.

    Shapes:
        logprobs: `[num_contexts, vocab_size]` float32

    Returns:
        The exact perplexity of these distributions, that of the tokens drawn, and the standard error of the logarithm
        of the latter.
    """
    generator = torch.Generator().manual_seed(4)
    entropies = -(logprobs.double().exp() * logprobs.double()).sum(1)
    one = torch.ones(1)
    parameters = SamplingParameters(one, -torch.inf * one, torch.zeros(1).int(), one, torch.zeros(1).long())
    zeros = torch.zeros(len(logprobs), dtype=torch.int64)
    sums, squares = 0.0, 0.0
    for _ in range(num_marks):
        marks = torch.randint(1, 2**63 - 1, (len(logprobs),), generator=generator)
        drawn = sample_tokens(logprobs, zeros, zeros, parameters, may_truncate=False, marks=marks)
        surplus = -logprobs.gather(1, drawn[:, None])[:, 0].double() - entropies
        sums, squares = sums + float(surplus.sum()), squares + float((surplus**2).sum())
    count, mean = num_marks * len(logprobs), float(entropies.mean())
    return math.exp(mean), math.exp(mean + sums / count), math.sqrt(squares) / count


def run(writer: Writer, length: int, num_texts: int, num_pairs: int) -> None:
    """Measure, print and record."""
    table = ResultTable("watermark", COLUMNS)

    def tell(measure: str, at: str, value: object) -> None:
        table.add({"measure": measure, "at": at, "value": value}, texts=num_texts, length=length)

    exact, of_draws, error = perplexity_of_draws(writer.distributions(), _NUM_MARKS)
    tell("perplexity of distributions", "exact", round(exact, 4))
    tell("perplexity of marked draws", f"{_NUM_MARKS} marks a context", round(of_draws, 4))
    tell("their ratio", f"standard error {error:.5f}", round(of_draws / exact, 5))
    plain, marked = writer.write(num_texts, is_marked=False), writer.write(num_texts, is_marked=True)
    for name, texts in (("unmarked", plain), ("marked", marked)):
        value, error = _perplexity(texts)
        tell(f"perplexity of {name} texts", f"standard error {error:.3f}", round(value, 3))
    tell("thread time", "marked / unmarked", round(writer.seconds[True] / writer.seconds[False], 3))
    lengths, source = [each for each in LENGTHS if each <= length], random.Random(5)
    keys = [source.randbytes(32) for _ in plain]
    unmarked = {
        each: _logarithms((text.token_ids[:each], key) for text, key in zip(plain, keys, strict=True))
        for each in lengths
    }
    found: dict[int, list[float]] = {each: [] for each in lengths}
    for share, each in itertools.product(EDITS, lengths):
        values = _logarithms(_edited_texts(marked, share, each, writer.vocab_size))
        found[each].append(sum(value <= -5 for value in values) / len(values))
        if share and each != lengths[-1]:
            continue
        at = f"{each} tokens, {share:.0%} edited"
        tell("AUC", at, round(auc(values, unmarked[each]), 5))
        tell("found at p <= 1e-5", at, round(found[each][-1], 4))
        tell("median log10 p", at, round(sorted(values)[len(values) // 2], 1))
    curves = [Line(f"{each} tokens", EDITS, shares) for each, shares in found.items()]
    PLOT.write_text(picture(line_chart("Share of marked texts found at p ≤ 1e-5", "share of tokens replaced", curves)))
    tell_false_positives(table, itertools.islice(itertools.cycle(text.token_ids for text in plain), num_pairs), length)


def main(arguments: Values[str] | None = None) -> None:
    """Parse the options, and run."""
    parser = bench_parser("watermark", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    parser.add_argument("--length", type=positive, default=200, help="tokens of a text")
    parser.add_argument("--texts", type=positive, default=256, help="texts with a watermark, and without")
    parser.add_argument("--pairs", type=positive, default=100_000, help="unmarked texts and keys in false positives")
    parser.add_argument("--corpus", type=Path, help="directory of texts: count only false positives, of --pairs texts")
    options = parser.parse_args(arguments)
    if options.corpus is not None:
        texts = itertools.islice(corpus_texts(options.corpus, options.model, options.length), options.pairs)
        tell_false_positives(ResultTable("watermark", COLUMNS), texts, options.length)
        return
    run(Writer(options.model, options.length), options.length, options.texts, options.pairs)


if __name__ == "__main__":
    main()
