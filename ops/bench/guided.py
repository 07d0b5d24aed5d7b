"""Guided beside free sequences on this machine's CPU: time of a step, and between two tokens.

Run as `python -m ops.bench.guided`. The engine alone serves the demo model, or `--model`, with as many sequences as the
batch says: all free, or all guided by one of three grammars, in turns. `text` and `string` leave a choice at nearly
every place, so that what they cost is the masks: `text` stays in one state of its grammar, as strings without limits
do; `string` counts its characters, and so is in a new state behind each token. `json` has parts without a choice, whose
tokens share a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Values
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.structured_output.compiled_grammar import CompiledGrammar, compile_grammar
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.options import add_list, bench_parser
from ops.bench.record import ResultTable
from ops.bench.stepping import engine_of
from ops.stack.config import DEMO_MODEL
from shared.grammar import Grammar
from shared.sampling import Sampling

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
    # Any text up to a character that the model does not say.
    "text": Grammar(kind="regex", source=r"[^\x00]+\x00"),
    "string": Grammar(kind="json_schema", source='{"type": "string", "minLength": 5000}'),
    "json": Grammar(kind="json_schema", source=json.dumps({"type": "array", "items": ITEM, "minItems": 500})),
}
PROMPT_TOKENS = 64
ROUNDS = 15
STEPS = 40
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Round:
    """What the steps of one round took together.

    Attributes:
        step_s: Seconds of a step.
        cpu_s: Seconds of computing of a step, which other processes of the machine lengthen less.
        tokens: Tokens of a sequence that a step made.
    """

    step_s: float
    cpu_s: float
    tokens: float

    @property
    def itl_s(self) -> float:
        """Seconds between two tokens of a sequence."""
        return self.step_s / self.tokens

    @property
    def cpu_a_token_s(self) -> float:
        """Seconds of computing between two tokens of a sequence."""
        return self.cpu_s / self.tokens


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
        constraints = SharedConstraints()
        runner = build_runner(
            RunnerConfig(
                model,
                block_size=BLOCK_SIZE,
                num_blocks=max_batch * -(-length // BLOCK_SIZE),
                max_num_seqs=max_batch,
                max_model_len=length,
                num_threads=num_threads,
            ),
            constraints=constraints,
        )
        self._engine = engine_of(runner, max_num_seqs=max_batch, has_prefix_cache=False, constraints=constraints)
        self._num_rounds = 0

    def run(self, kind: str, batch: int) -> Round:
        """Serve a batch of one kind, and take the times of steps in which all of it decodes."""
        engine, sequences = self._engine, self._sequences(kind, batch)
        for sequence in sequences:
            engine.engine.add(sequence)
        engine.prefill(sequences)
        before = sum(sequence.num_output_tokens for sequence in sequences)
        computed = time.thread_time()
        seconds = sum(engine.step_seconds(STEPS))
        cpu_s = time.thread_time() - computed
        num_tokens = sum(sequence.num_output_tokens for sequence in sequences) - before
        engine.abort(sequences)
        return Round(seconds / STEPS, cpu_s / STEPS, num_tokens / STEPS / batch)

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


def measure(bench: Bench, batch: int, table: ResultTable) -> None:
    """Measure all kinds in turn, print them beside the free ones of the same rounds, and record them."""
    rounds: dict[str, list[Round]] = {kind: [] for kind in (FREE, *GRAMMARS)}
    for _ in range(ROUNDS):
        for kind, taken in rounds.items():
            taken.append(bench.run(kind, batch))
    free = rounds[FREE]
    for kind, taken in rounds.items():
        pairs = list(zip(taken, free, strict=True))
        table.add(
            {
                "batch": batch,
                "kind": kind,
                "step_ms": round(median(each.step_s for each in taken) * 1e3, 3),
                "cpu_ms": round(median(each.cpu_s for each in taken) * 1e3, 3),
                "tokens_a_step": round(mean(each.tokens for each in taken), 2),
                "itl_to_free": round(median(each.itl_s / other.itl_s for each, other in pairs), 3),
                "cpu_a_token_to_free": round(
                    median(each.cpu_a_token_s / other.cpu_a_token_s for each, other in pairs), 3
                ),
            }
        )


def main(arguments: Values[str] | None = None) -> None:
    """Print the table and append its rows to the results."""
    parser = bench_parser("guided", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    add_list(parser, "--batch", int, [1, 32], "sequences at once: 1,32")
    parser.add_argument("--num-threads", type=int, default=1, help="of CPU operations")
    options = parser.parse_args(arguments)
    bench = Bench(options.model, max(options.batch), options.num_threads)
    table = ResultTable("guided")
    for batch in options.batch:
        measure(bench, batch, table)


if __name__ == "__main__":
    main()
