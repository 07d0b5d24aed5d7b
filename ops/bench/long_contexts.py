"""Budgets of KV cache: perplexity and recall by policy beside a whole cache, and a long text in flat memory.

Run as `python -m ops.bench.long_contexts`; `--plots` writes the plots of `ops/docs/long-contexts.md`. The engine alone
computes the demo model, or `--model`, on texts that it never saw (`ops.demo_model.corpus`). Recall is by how much a
passage is predicted better at the end of a text that has it at some depth too.
"""

from __future__ import annotations

import math
import random
import resource
import time
from collections.abc import Sequence as Values
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker.core.block_budget import BlockScores, block_budget
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.memory.kv_cache import bytes_per_block
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.record import ResultTable, bench_parser, positive
from ops.bench.stepping import BLOCK_SIZE, make_engine
from ops.chart import Line, line_chart, picture
from ops.demo_model.corpus import held_out_documents
from ops.stack.config import DEMO_MODEL
from shared.kv_budget import KvBudget, KvPolicy

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
SHARES = (0.125, 0.25, 0.5)
POLICIES: tuple[KvPolicy, ...] = ("sinks", "heavy_hitters", "persistence")
DEPTHS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
MEASURES = ("perplexity", "recall", "memory")
PASSAGE = 48
_BATCH = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache: its type of numbers, and the share of a text's tokens that it keeps, by a policy."""

    dtype: str = "auto"
    share: float = 1.0
    policy: KvPolicy = "sinks"

    @property
    def name(self) -> str:
        """How tables call it."""
        kept = "all" if self.share == 1 else f"{self.share:.1%} by {self.policy}"
        return f"{'16 bits' if self.dtype == 'auto' else self.dtype}, {kept}"


class Reader:
    """Owns an engine that reads texts with a cache of one type."""

    def __init__(self, model: Path, dtype: str, length: int) -> None:
        config = RunnerConfig(model, "float32", kv_cache_dtype=dtype, max_num_seqs=_BATCH, num_threads=2)
        self._engine = make_engine(replace(config, num_blocks=_BATCH * (-(-length // BLOCK_SIZE) + 1)))
        self.runner = self._engine.runner
        self._length = length

    def logprobs(self, texts: Values[list[int]], setting: Setting) -> list[list[float]]:
        """Return the log probabilities of each text's tokens but the first."""
        found: dict[str, list[float]] = {}
        for text in texts:
            sequence = self._engine.sequence(text, 1, prompt_logprobs=0)
            if setting.share < 1:
                budget = KvBudget(round(setting.share * self._length), setting.policy)
                _limit(sequence, budget, self.runner.max_model_len)
            found[sequence.id] = []
            self._engine.engine.add(sequence)
        for event in self._engine.events():
            found[event.sequence.id] += [entry.logprob for entry in event.prompt_logprobs]
        return list(found.values())


def _limit(sequence: Sequence, budget: KvBudget, max_num_blocks: int) -> None:
    sequence.budget = block_budget(budget, BLOCK_SIZE, max_num_blocks)
    if sequence.budget.is_scored:
        sequence.scores = BlockScores(sequence.budget)


def repeated(token_ids: list[int], length: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Return passages, each with a text from elsewhere that fills up to `length` tokens with the passage twice."""
    source, room = random.Random(6), length - 2 * PASSAGE
    found: list[tuple[list[int], list[int]]] = []
    while len(found) < count:
        passage, filler = (source.randrange(len(token_ids) - size) for size in (PASSAGE, room))
        if filler + room <= passage or passage + PASSAGE <= filler:
            found.append((token_ids[passage : passage + PASSAGE], token_ids[filler : filler + room]))
    return found


def perplexities(
    model: Path, texts: Values[list[int]], length: int, table: ResultTable
) -> dict[Setting, tuple[float, float]]:
    """Measure every setting; return its bytes for each token of a text, as a share of 16 bits, and its perplexity."""
    found: dict[Setting, tuple[float, float]] = {}
    for dtype in ("auto", "int8"):
        reader = Reader(model, dtype, length)
        config = reader.runner.model_config
        # Computed in 32 bits, which stand for 16: the cache of a model served in 16 bits has half of its bytes.
        whole = bytes_per_block(BLOCK_SIZE, config, reader.runner.dtype) / 2
        own = whole if dtype == "auto" else sum(layer.block_bytes for layer in reader.runner.cache.layers)
        policies = POLICIES if dtype == "auto" else POLICIES[1:2]
        budgets = [Setting(dtype, share, policy) for policy in policies for share in SHARES]
        for setting in (Setting(dtype), *budgets):
            started = time.perf_counter()
            rows = reader.logprobs(texts, setting)
            mean = -math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
            found[setting] = setting.share * own / whole, math.exp(mean)
            exact = found[Setting()][1]
            row = {"measure": "perplexity", "at": setting.name, "value": round(found[setting][1], 3)}
            more = {"of 16 bits whole": round(found[setting][1] / exact, 4), "bytes": round(found[setting][0], 4)}
            table.add(row | more, seconds=round(time.perf_counter() - started, 1), length=length, texts=len(texts))
    return found


def recall(
    model: Path, cases: Values[tuple[list[int], list[int]]], length: int, table: ResultTable
) -> dict[Setting, list[float]]:
    """Return for each cache the nats a token that a passage at each depth saves where it is repeated at the end."""
    readers = {dtype: Reader(model, dtype, length) for dtype in ("auto", "int8")}

    def nats(texts: list[list[int]], setting: Setting) -> float:
        rows = readers[setting.dtype].logprobs(texts, setting)
        return -math.fsum(math.fsum(row[1 - PASSAGE :]) for row in rows) / (len(rows) * (PASSAGE - 1))

    unseen = nats([[*filler, *passage] for passage, filler in cases], Setting())
    found: dict[Setting, list[float]] = {}
    for setting in (Setting(), Setting("int8"), *(Setting(share=0.5, policy=policy) for policy in POLICIES)):
        for depth in DEPTHS:
            texts = []
            for passage, filler in cases:
                place = round(depth * len(filler))
                texts.append([*filler[:place], *passage, *filler[place:], *passage])
            found.setdefault(setting, []).append(unseen - nats(texts, setting))
            at = f"{setting.name}, depth {depth:.0%}"
            table.add({"measure": "nats saved by a passage", "at": at, "value": round(found[setting][-1], 3)})
    return found


def flat_memory(model: Path, num_tokens: int, budget: KvBudget, table: ResultTable) -> None:
    """Generate a long text with a budget, in an engine that has blocks for no more."""
    config = RunnerConfig(model, "float32", num_blocks=2048 // BLOCK_SIZE, max_num_seqs=1, num_threads=2)
    stepped = make_engine(config, enable_prefix_caching=True)
    sequence = stepped.sequence([1, 2, 3], num_tokens, temperature=1.0)
    _limit(sequence, budget, stepped.runner.num_blocks)
    stepped.engine.add(sequence)
    most_blocks, first_kb, started, seconds = 0, 0, time.perf_counter(), 0.0
    for step in range(num_tokens):
        stepped.step()
        stats = stepped.engine.stats
        most_blocks = max(most_blocks, stats.total_blocks - stats.free_blocks)
        if step == num_tokens // 10:
            first_kb, seconds = _resident_kb(), time.perf_counter() - started
    rate = (num_tokens - num_tokens // 10) / (time.perf_counter() - started - seconds)
    at = f"{num_tokens} tokens, {budget.tokens} kept by {budget.policy}"
    for name, value in (
        ("blocks held at most", most_blocks),
        ("resident MB from a tenth on", round((_resident_kb() - first_kb) / 1024, 1)),
        ("tokens/s of its last nine tenths, of its first", round(rate * seconds / (num_tokens // 10), 3)),
    ):
        table.add({"measure": name, "at": at, "value": value})


def _resident_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plot_perplexities(found: dict[Setting, tuple[float, float]]) -> None:
    """Write the plot of perplexity by bytes beside the documentation."""
    exact = found[Setting()][1]
    lines = []
    for dtype, policy in (*(("auto", policy) for policy in POLICIES), ("int8", POLICIES[1])):
        settings = [*(Setting(dtype, share, policy) for share in SHARES), Setting(dtype)]
        sizes, values = zip(*(found[setting] for setting in settings), strict=True)
        name = policy if dtype == "auto" else f"{policy}, {dtype}"
        lines.append(Line(name, sizes, [value / exact for value in values]))
    top = math.ceil(20 * max(max(line.y) for line in lines)) / 20
    title = "Perplexity, as a multiple of that with a whole cache of 16 bits"
    _write("kv-budget-perplexity", line_chart(title, "bytes, as a share of that cache", lines, 0.95, top))


def plot_recall(by_depth: dict[Setting, list[float]]) -> None:
    """Write the plot of recall by depth beside the documentation."""
    lines = [
        Line(setting.dtype if setting.dtype != "auto" else "whole" if setting.share == 1 else setting.policy, DEPTHS, y)
        for setting, y in by_depth.items()
    ]
    title = "Nats a token that a passage saves where it comes again"
    top = math.ceil(max(max(line.y) for line in lines))
    _write("kv-budget-recall", line_chart(title, "depth of the passage in the text", lines, min(0.0, *lines[2].y), top))


def _write(name: str, chart: str) -> None:
    (ASSETS / f"{name}.svg").write_text(picture(chart), encoding="utf-8")


def main(arguments: Values[str] | None = None) -> None:
    """Parse the options, and run."""
    parser = bench_parser("long_contexts", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    parser.add_argument("--length", type=positive, default=2000, help="tokens of a text")
    parser.add_argument("--texts", type=positive, default=24, help="texts whose perplexity is measured")
    parser.add_argument("--recall-length", type=positive, default=800, help="tokens of a text that repeats a passage")
    parser.add_argument("--passages", type=positive, default=8, help="passages at each depth")
    parser.add_argument("--tokens", type=positive, default=100_000, help="tokens of the text in flat memory")
    parser.add_argument("--policy", choices=POLICIES, default="heavy_hitters", help="which tokens that text keeps")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES, help="the measurements to make")
    parser.add_argument("--plots", action="store_true", help="write the plots of the documentation")
    options = parser.parse_args(arguments)
    tokenizer = ModelTokenizer(read_model_directory(options.model))
    documents = held_out_documents()
    token_ids = [token for text in documents for token in tokenizer.encode_text(text, add_special_tokens=False)]
    table = ResultTable("long_contexts", ("measure", "at", "value", "of 16 bits whole", "bytes"))
    length = options.length
    texts = [token_ids[first : first + length] for first in range(0, len(token_ids) - length + 1, length)]
    if "perplexity" in options.measures:
        found = perplexities(options.model, texts[: options.texts], length, table)
        if options.plots:
            plot_perplexities(found)
    if "recall" in options.measures:
        cases = repeated(token_ids, options.recall_length, options.passages)
        by_depth = recall(options.model, cases, options.recall_length, table)
        if options.plots:
            plot_recall(by_depth)
    if "memory" in options.measures:
        flat_memory(options.model, options.tokens, KvBudget(512, options.policy), table)


if __name__ == "__main__":
    main()
