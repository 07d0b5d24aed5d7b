"""A process that gets encoded plans, and nothing else: it answers each with the encoded result of its step.

`python -m tests.gpu_worker.execution.replica CONFIG` reads plans from its standard input, each behind its length in
four bytes, and writes results alike. `CONFIG` is a JSON object: the directory of a model, whose runner verifies n-gram
drafts; without one the runner is the simulated one. Grammars are compiled here.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.plan import NewSequence, StepPlan
from gpu_worker.execution.simulated_runner import SimulatedRunner
from tests.gpu_worker.structured_output.tiny_tokenizer import VOCAB, constraint_of


class OwnConstraints:
    """Makes constraints of the grammars in plans, and advances them by the tokens there."""

    def open(self, new: NewSequence) -> OutputConstraint:
        return constraint_of(new.sampling, new.token_ids[new.num_prompt_tokens :])

    def follow(self, constraint: OutputConstraint, token_ids: list[int]) -> None:
        for token_id in token_ids:
            assert constraint.advance(token_id), "a plan has a token that the grammar does not allow"


def make_runner(config: dict[str, Any], constraints: Any) -> ModelRunner:
    """Make the runner of either process."""
    if config["directory"] is None:
        return SimulatedRunner(0, range(3, VOCAB), constraints=constraints)
    from pathlib import Path

    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.speculative.ngram.proposer import NgramProposer

    runner = build_runner(
        RunnerConfig(
            Path(config["directory"]),
            block_size=4,
            num_blocks=120,
            max_num_seqs=6,
            num_threads=1,
            max_draft_tokens=4,
            state_checkpoint_ratio=0.5,
        ),
        constraints=constraints,
    )
    runner.verify_drafts_of(NgramProposer(100_000))
    return runner


def send(stream: BinaryIO, value: object) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    length = stream.read(4)
    return stream.read(struct.unpack("<I", length)[0]) if len(length) == 4 else None


def main() -> None:
    runner = make_runner(json.loads(sys.argv[1]), OwnConstraints())
    while (data := receive(sys.stdin.buffer)) is not None:
        send(sys.stdout.buffer, runner.submit(msgspec.msgpack.decode(data, type=StepPlan)).result())


if __name__ == "__main__":
    main()
