"""Guided beside free sequences on this machine's CPU: time of a step, and between two tokens.

Run as `python -m ops.bench.guided`. The engine alone serves the demo model, or `--model`, with as many sequences as the
batch says: all free, or all guided by one of two grammars, in turns. `string` leaves a choice at nearly every place, so
that what it costs is the masks; `json` has parts without a choice, whose tokens share a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ops
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.structured_output.compiled_grammar import CompiledGrammar, compile_grammar
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.record import append_record
from ops.bench.stepping import make_engine, step, step_while
from shared.sampling import Grammar, Sampling

MODEL = Path(ops.__file__).parent / "demo_model" / "model"
FREE = "free"
ITEM = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 40},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 9999},
        "availability": {"enum": ["in stock", "out of stock", "discontinued"]},
    },
    "required": ["description", "quantity", "availability"],
    "additionalProperties": False,
}
GRAMMARS = {
    "string": Grammar(kind="json_schema", source='{"type": "string", "minLength": 5000}'),
    "json": Grammar(kind="json_schema", source=json.dumps({"type": "array", "items": ITEM, "minItems": 500})),
}
PROMPT_TOKENS = 64
ROUNDS = 7
STEPS = 40
BLOCK_SIZE = 16


@dataclass(slots=True)
class Samples:
    """What the rounds of one kind of sequences took.

    Attributes:
        step_s: Seconds of each step.
        cpu_s: Seconds of computing of each step, which other processes of the machine lengthen less.
        tokens: Tokens of a sequence that each step made.
    """

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Median of the steps."""
        return statistics.median(self.step_s) * 1e3

    @property
    def cpu_ms(self) -> float:
        """Median of computing in the steps."""
        return statistics.median(self.cpu_s) * 1e3

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a sequence in a step, on the average."""
        return statistics.mean(self.tokens)


class Bench:
    """Owns an engine and the grammars."""

    def __init__(self, model: Path, max_batch: int, num_threads: int | None) -> None:
        """Load the model."""
        directory = read_model_directory(model)
        self._eos_token_ids = directory.eos_token_ids
        self._tokenizer = ModelTokenizer(directory)
        tokenizer = self._tokenizer.grammar_tokenizer
        self._compiled: dict[str, CompiledGrammar] = {
            name: compile_grammar(grammar, tokenizer) for name, grammar in GRAMMARS.items()
        }
        # A step of forced tokens makes several.
        self._max_tokens = STEPS * 18
        length = min(directory.max_model_len, PROMPT_TOKENS + self._max_tokens)
        runner = build_runner(
            RunnerConfig(
                model,
                block_size=BLOCK_SIZE,
                num_blocks=max_batch * -(-length // BLOCK_SIZE),
                max_num_seqs=max_batch,
                max_model_len=length,
                num_threads=num_threads,
            )
        )
        self._engine: Engine = make_engine(
            runner,
            num_blocks=runner.num_blocks,
            max_num_seqs=max_batch,
            token_budget=512,
            max_model_len=length,
            has_prefix_cache=False,
        )
        self._num_rounds = 0

    def run(self, kind: str, batch: int, samples: Samples) -> None:
        """Serve a batch of one kind, and take the times of steps in which all of it decodes."""
        engine, sequences = self._engine, self._sequences(kind, batch)
        for sequence in sequences:
            engine.add(sequence)
        step_while(engine, lambda: any(sequence.num_output_tokens == 0 for sequence in sequences))
        for _ in range(STEPS):
            before = sum(sequence.num_output_tokens for sequence in sequences)
            started, computed = time.perf_counter(), time.thread_time()
            step(engine)
            samples.step_s.append(time.perf_counter() - started)
            samples.cpu_s.append(time.thread_time() - computed)
            samples.tokens.append((sum(sequence.num_output_tokens for sequence in sequences) - before) / batch)
        for sequence in sequences:
            assert engine.abort(sequence.id) is not None, "a sequence has ended before its time"
        step_while(engine, engine.has_work)

    def _sequences(self, kind: str, batch: int) -> list[Sequence]:
        """Make sequences that outlast a round. Their prompts are parts of this file."""
        self._num_rounds += 1
        text = self._tokenizer.encode_text(Path(__file__).read_text() * 2)
        made = []
        for number in range(batch):
            grammar = GRAMMARS.get(kind)
            sampling = Sampling(temperature=1.0, seed=number, grammar=grammar)
            prompt = text[number : number + PROMPT_TOKENS]
            name = f"{kind} {self._num_rounds} {number}"
            sequence = Sequence(name, prompt, len(prompt), sampling, max_tokens=self._max_tokens)
            if grammar is not None:
                sequence.constraint = self._compiled[kind].constraint(sampling, ())
            made.append(sequence)
        return made


def measure(bench: Bench, batch: int, show: Callable[[str], None]) -> None:
    """Measure all kinds in turn, print them, and record them."""
    samples = {kind: Samples() for kind in (FREE, *GRAMMARS)}
    for _ in range(ROUNDS):
        for kind, taken in samples.items():
            bench.run(kind, batch, taken)
    free = samples[FREE]
    for kind, taken in samples.items():
        row = {
            "batch": batch,
            "kind": kind,
            "step_ms": round(taken.step_ms, 3),
            "cpu_ms": round(taken.cpu_ms, 3),
            "tokens_a_step": round(taken.tokens_a_step, 2),
            "step_to_free": round(taken.step_ms / free.step_ms, 3),
            "itl_to_free": round(taken.step_ms / taken.tokens_a_step / free.step_ms, 3),
            "cpu_a_token_to_free": round(taken.cpu_ms / taken.tokens_a_step / free.cpu_ms, 3),
        }
        show(" ".join(f"{value:>{max(6, len(name)) if name == 'kind' else len(name)}}" for name, value in row.items()))
        append_record("guided", "python -m ops.bench.guided", row)


def main() -> None:
    """Print the table and append its rows to the results."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.guided", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="Directory of the model.")
    parser.add_argument("--batches", default="1,32", help="Sequences at once, separated by commas.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of CPU operations.")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    bench = Bench(options.model, max(batches), options.threads)
    print("batch   kind step_ms cpu_ms tokens_a_step step_to_free itl_to_free cpu_a_token_to_free")
    for batch in batches:
        measure(bench, batch, print)


if __name__ == "__main__":
    main()
