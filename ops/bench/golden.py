"""Golden probes of the right model, in memory: false alarms, and the cost of a probe to other requests.

Run as `python -m ops.bench.golden`. The engine alone serves the demo model, beside random people and jobs, in many
forms: number types, kernels compiled or plain torch, threads, tokens of a step, places and blocks. What one form rounds
otherwise than another is what devices and batches round. The baseline is the first form's, in float32. Few forms have
two threads: these wait for each other, which takes processor time where others want the cores.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from gpu_worker.consumer.golden.prober import GoldenProber, ProbeSizes
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import EngineStats
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from kernels.cpu_library import cpu_library
from ops.bench.record import ResultTable, bench_parser
from ops.bench.stepping import BLOCK_SIZE, make_engine
from ops.golden.prompts import default_prompts
from ops.stack.config import DEMO_MODEL
from shared.golden import NUM_ANSWER_TOKENS, NUM_TOP, Baseline, GoldenPrompt
from shared.golden_statistic import limit
from shared.sampling import Sampling

_MAX_MODEL_LEN = 1024
_PROBES_OF_FORM = {True: 60, False: 15}
_BESIDE = (0, 0, 3, 6, 12, 24)
"""Sequences beside a probe at most."""
_BUSY_SEQUENCES, _BUSY_PROBES = 600, 8
_UNTHROTTLED = 100.0


@dataclass(frozen=True, slots=True)
class Form:
    """How an engine serves the model.

    Attributes:
        is_compiled: By the compiled kernels; otherwise by plain torch.
        batch_slowdown: How far batch work, probes too, may slow steps of people down. A large share lets both into
            the same steps.
    """

    dtype: str = "float32"
    is_compiled: bool = True
    num_threads: int = 2
    token_budget: int = 512
    num_blocks: int = 300
    max_num_seqs: int = 16
    batch_slowdown: float = 0.05

    @classmethod
    def drawn(cls, source: random.Random) -> Form:
        """Return any form."""
        return cls(
            source.choice(("float32", "bfloat16", "bfloat16", "float16")),
            source.random() < 0.8,
            source.choice((*[1] * 15, 2)),
            source.choice((64, 100, 128, 256, 512)),
            source.randrange(64, 400),
            source.choice((4, 9, 16, 32)),
            source.choice((0.05, *[1.0] * 3, *[_UNTHROTTLED] * 4)),
        )


@contextmanager
def _kernels(is_compiled: bool) -> Iterator[None]:
    try:
        with mock.patch.dict(os.environ, {} if is_compiled else {"HEADRACE_CPU_KERNELS": "off"}):
            cpu_library.cache_clear()
            yield
    finally:
        cpu_library.cache_clear()


class ProbedLab:
    """An engine of a checkpoint, and, with a baseline, a prober in it.

    Attributes:
        now: What the prober takes for the time, in seconds.
        others: Events of other sequences than the prober's.
    """

    def __init__(
        self, model: Path, baseline: Baseline | None = None, form: Form | None = None, share: float = 1.0
    ) -> None:
        form = form or Form()
        config = RunnerConfig(
            model,
            form.dtype,
            num_blocks=form.num_blocks,
            max_num_seqs=form.max_num_seqs,
            max_num_batched_tokens=form.token_budget,
            max_model_len=_MAX_MODEL_LEN,
            num_threads=form.num_threads,
        )
        made = make_engine(config, enable_prefix_caching=True, batch_slowdown=form.batch_slowdown)
        self.runner, self.engine = made.runner, made.engine
        self.now = 0.0
        self.others: list[SequenceEvent] = []
        self._is_probed = baseline is not None
        if baseline is not None:
            fits = ProbeSizes(_MAX_MODEL_LEN, BLOCK_SIZE)
            self.prober = GoldenProber(self, baseline, share, lambda: self.now, fits)

    @property
    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.engine.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence."""
        self.engine.abort(sequence_id)

    def step(self) -> None:
        """Take a step."""
        for event in self.engine.step():
            if not (self._is_probed and self.prober.take(event)):
                self.others.append(event)
        assert self.engine.last_error is None

    def probe(self, during: Callable[[], object] = lambda: None) -> float:
        """Run one probe to its end, calling `during` before each step; return its deviation."""
        before = self.prober.num_probes
        # Whatever is owed is paid.
        self.now += 1e6
        self.prober.tick(may_begin=True)
        while self.prober.num_probes == before:
            during()
            self.step()
            assert not self.prober.num_given_up
        return self.prober.deviation

    def finish(self) -> list[SequenceEvent]:
        """Step until nothing is left; return the events of other sequences than the prober's so far."""
        while self.engine.has_work():
            self.step()
        events, self.others = self.others, []
        return events

    def run(self, sequence: Sequence) -> list[SequenceEvent]:
        """Serve a sequence alone, and return its events."""
        self.engine.add(sequence)
        return self.finish()


def record(model: Path, numbers: Values[int] = range(10), max_tokens: int = 640) -> Baseline:
    """Record some of the default prompts as `headrace golden record` does, straight from the engine."""
    tokenizer = ModelTokenizer(read_model_directory(model))
    texts = default_prompts()
    lab, prompts = ProbedLab(model), []
    for number in numbers:
        ids = tokenizer.encode_text(texts[number], add_special_tokens=False)[:max_tokens]
        sequence = Sequence(f"s{number}", list(ids), len(ids), Sampling(temperature=0, prompt_logprobs=0), 0)
        scores = [entry.logprob for event in lab.run(sequence) for entry in event.prompt_logprobs]
        prompts.append(GoldenPrompt(tuple(ids), tuple(scores)))
    anchor = list(prompts[0].token_ids)
    sampling = Sampling(temperature=0, logprobs=NUM_TOP, ignore_eos=True)
    events = lab.run(Sequence("answer", list(anchor), len(anchor), sampling, NUM_ANSWER_TOKENS))
    answer = tuple(entry.top for event in events for entry in event.logprobs)
    return Baseline(model="demo", recorded=0.0, noise=0.0, prompts=tuple(prompts), answer=answer)


class Crowd:
    """People and jobs that come to an engine beside its probes: at once `most` of them at most."""

    def __init__(self, lab: ProbedLab, source: random.Random, most: int = 6, chance: float = 0.3) -> None:
        self._lab = lab
        self._source = source
        self._most = most
        self._chance = chance
        self.num_come = 0

    def come(self) -> None:
        """Let one come, or none."""
        stats, source = self._lab.stats, self._source
        if stats.running + stats.waiting >= self._most or source.random() >= self._chance:
            return
        self.num_come += 1
        length = source.randrange(1, 100)
        prompt = [source.randrange(1, 4096) for _ in range(length)]
        sampling = Sampling(temperature=source.choice((0.0, 1.0)), seed=source.randrange(1000), ignore_eos=True)
        sequence = Sequence(f"o{self.num_come}", prompt, length, sampling, source.randrange(1, 12), arrival=0.0)
        sequence.lane = source.choice(("interactive", "batch"))
        self._lab.add(sequence)


@dataclass(slots=True)
class Found:
    """What probes of the right model have found.

    Attributes:
        deviations: By the type of the numbers, whether by compiled kernels, and the most sequences beside.
        failed: Those over the limit.
        processor_s: Seconds of a core that all took, with what they shared steps with.
    """

    deviations: defaultdict[tuple[str, bool, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: list[float] = field(default_factory=list)
    num_engines: int = 0
    num_preemptions: int = 0
    processor_s: float = 0.0

    @property
    def num_probes(self) -> int:
        """All that ended."""
        return sum(map(len, self.deviations.values()))

    def tell(self, table: ResultTable, limit: float) -> None:
        """Print and record it."""
        shared = {"engines": self.num_engines, "preemptions": self.num_preemptions, "failed": len(self.failed)}
        shared["processor_s"] = round(self.processor_s)
        for (dtype, is_compiled, beside), values in sorted(self.deviations.items()):
            row: dict[str, object] = {"numbers": dtype, "kernels": "compiled" if is_compiled else "torch"}
            row |= {"beside": beside, "probes": len(values)}
            table.add(row | {"largest": round(max(values), 5), "median": round(median(values), 5)}, **shared)
        print(f"{len(self.failed)} of {self.num_probes} failed (limit {limit:g}); {shared}")


def false_alarms(baseline: Baseline, model: Path, num_probes: int, seed: int) -> Found:
    """Probe the right model in many forms."""
    source, found, began = random.Random(seed), Found(), time.process_time()
    while (rest := num_probes - found.num_probes) > 0:
        form = Form.drawn(source)
        with _kernels(form.is_compiled):
            lab = ProbedLab(model, baseline, form)
            for _ in range(min(rest, _PROBES_OF_FORM[form.is_compiled])):
                beside = source.choice(_BESIDE)
                deviation = lab.probe(Crowd(lab, source, beside).come)
                found.deviations[form.dtype, form.is_compiled, beside].append(deviation)
                if lab.prober.in_a_row:
                    found.failed.append(deviation)
                    print(f"failed: {deviation:.4g}, {form}", flush=True)
                lab.finish()
        found.num_engines += 1
        found.num_preemptions += lab.stats.num_preemptions
        found.processor_s = time.process_time() - began
        told = f"{found.num_probes} of {num_probes} probes, {len(found.failed)} failed"
        print(f"{told}, {found.processor_s:.0f} s of a core", file=sys.stderr, flush=True)
    return found


def throughput(baseline: Baseline, model: Path, rounds: int, table: ResultTable) -> None:
    """Print how much longer a busy engine computes for the same work where it is probed too, by what probes paid."""
    for _ in range(rounds):
        plain_s, _, _ = _busy(baseline, model, 0)
        probed_s, seconds, prober = _busy(baseline, model, _BUSY_PROBES)
        paid_s = prober.device_s * probed_s / seconds
        row = {"probes": prober.num_probes, "paid_ms": round(paid_s / prober.num_probes * 1e3, 1)}
        table.add({**row, "lost_of_paid": round((probed_s - plain_s) / paid_s, 3)})


def _busy(baseline: Baseline, model: Path, num_probes: int) -> tuple[float, float, GoldenProber]:
    """Serve many sequences and some probes; return the seconds that the thread computed, and all that passed."""
    lab = ProbedLab(model, baseline, Form(num_threads=1))
    crowd, begun_at = Crowd(lab, random.Random(0), most=14, chance=1.0), -1
    began, started = time.thread_time(), time.perf_counter()
    while crowd.num_come < _BUSY_SEQUENCES or lab.engine.has_work():
        if crowd.num_come < _BUSY_SEQUENCES:
            crowd.come()
            place = crowd.num_come * num_probes // _BUSY_SEQUENCES
            if place > begun_at and num_probes:
                begun_at = place
                lab.now += 1e6
                lab.prober.tick(may_begin=True)
        lab.step()
    return time.thread_time() - began, time.perf_counter() - started, lab.prober


def main(arguments: Values[str] | None = None) -> None:
    """Parse the options, and run."""
    parser = bench_parser("golden", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    parser.add_argument("--probes", type=int, default=1000, help="that look for false alarms")
    parser.add_argument("--tokens", type=int, default=160, help="of a prompt at most; means of fewer vary more")
    parser.add_argument("--seed", type=int, default=1, help="of the forms and the people")
    parser.add_argument("--rounds", type=int, default=0, help="of what probes take of the throughput")
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    baseline = record(options.model, max_tokens=options.tokens)
    if options.probes:
        found = false_alarms(baseline, options.model, options.probes, options.seed)
        found.tell(ResultTable("golden"), limit(baseline.noise))
    if options.rounds:
        throughput(baseline, options.model, options.rounds, ResultTable("golden"))


if __name__ == "__main__":
    main()
