"""Train the demo model: tokenizer first, then the network, for a fixed time on whatever CPU there is.

`python -m ops.demo_model.train --minutes 55` writes `model/` anew. The schedule follows elapsed time, not steps: a
run on a busy machine sees fewer tokens but always ends with its learning rate decayed. Snapshots are exported on the
way.

Source: Muon for the matrices inside the layers (Jordan et al. 2024), AdamW for embeddings and norms, bfloat16 autocast.
"""

import argparse
import logging
import platform
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ops.demo_model.architecture import Llama, LlamaShape
from ops.demo_model.batches import BatchSource, window_length
from ops.demo_model.card import write_card
from ops.demo_model.chat import chat_documents
from ops.demo_model.corpus import held_out_documents, training_documents
from ops.demo_model.evaluate import SLICE_WINDOWS, describe, evaluate
from ops.demo_model.export import MODEL_FOLDER, export_model, load_model
from ops.demo_model.tokenizer import encode_documents, train_tokenizer
from ops.train_draft.optimization import Optimization

logger = logging.getLogger(__name__)

NUM_THREADS = 2
LOG_EVERY_STEPS = 20
OTHER_LEARNING_RATE = 3e-3
WARMUP_FRACTION = 0.01
DECAY_FRACTION = 0.6


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What a run can choose."""

    minutes: float = 55.0
    seed: int = 1
    tokens_per_step: int = 4096
    snapshot_minutes: float = 5.0
    folder: Path = MODEL_FOLDER
    shape: LlamaShape = field(default_factory=LlamaShape)


def learning_rate_scale(fraction: float) -> float:
    """Return the factor on the learning rates at a fraction of the training time: warm up, hold, fall to zero."""
    return max(0.0, min(1.0, fraction / WARMUP_FRACTION, (1.0 - fraction) / DECAY_FRACTION))


class Trainer:
    """One training run; owns the network, the optimizers and the counters of the run."""

    def __init__(self, options: TrainingOptions) -> None:
        """Read the corpus, train the tokenizer and create the network."""
        self.options = options
        torch.set_num_threads(NUM_THREADS)
        torch.manual_seed(options.seed)
        documents = list(training_documents())
        self.tokenizer: Tokenizer = train_tokenizer(documents)
        files = encode_documents(self.tokenizer, documents)
        chats = encode_documents(self.tokenizer, chat_documents(documents, random.Random(options.seed)))
        self.corpus_tokens = sum(map(len, files))
        self.batches = BatchSource(files, chats, options.tokens_per_step, options.seed)
        self.model = Llama(options.shape)
        self.optimization = Optimization(self.model, OTHER_LEARNING_RATE, decay=0.1)
        logger.info("corpus: %d files, %d tokens; %d chats", len(files), self.corpus_tokens, len(chats))

    def run(self) -> None:
        """Train until the time is over, exporting snapshots on the way and the final weights at the end."""
        started = time.monotonic()
        next_snapshot = self.options.snapshot_minutes
        while (minutes := (time.monotonic() - started) / 60) < self.options.minutes:
            self._step(minutes / self.options.minutes)
            if self.optimization.num_steps % LOG_EVERY_STEPS == 0:
                self._log(minutes)
            if minutes >= next_snapshot:
                self._export(minutes, SLICE_WINDOWS)
                next_snapshot += self.options.snapshot_minutes
        self._export(self.options.minutes, max_windows=None)
        write_card(self.options.folder)

    def _step(self, fraction: float) -> None:
        inputs, targets = self.batches.next_batch(window_length(fraction))
        self.optimization.step(_loss(self.model, inputs, targets), learning_rate_scale(fraction))

    def _log(self, minutes: float) -> None:
        tokens = self.optimization.num_steps * self.options.tokens_per_step
        logger.info(
            "minute %.1f step %d tokens %.2fM loss %.3f window %d tokens/s %.0f",
            minutes,
            self.optimization.num_steps,
            tokens / 1e6,
            self.optimization.mean_loss,
            window_length(minutes / self.options.minutes),
            tokens / max(minutes * 60, 1e-9),
        )

    def _export(self, minutes: float, max_windows: int | None) -> None:
        """Export the weights, measure the files as written, and record it; all windows when it is the end."""
        record = self._record(minutes, is_final=max_windows is None)
        export_model(self.model, self.tokenizer, record, self.options.folder)
        shipped, _ = load_model(self.options.folder)
        documents = held_out_documents()
        record["held_out"] = describe(evaluate(shipped, self.tokenizer, documents, max_windows))
        record["held_out_slice"] = describe(evaluate(shipped, self.tokenizer, documents, SLICE_WINDOWS))
        export_model(self.model, self.tokenizer, record, self.options.folder)
        logger.info("exported at minute %.1f: %s", minutes, record)

    def _record(self, minutes: float, *, is_final: bool) -> dict[str, Any]:
        return {
            "is_final": is_final,
            "seed": self.options.seed,
            "steps": self.optimization.num_steps,
            "tokens": self.optimization.num_steps * self.options.tokens_per_step,
            "corpus_tokens": self.corpus_tokens,
            "minutes": round(minutes, 1),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "machine": "two CPU cores",
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "training_loss": round(self.optimization.mean_loss, 4),
        }


def _loss(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main() -> None:
    """Train as the command line says."""
    defaults = TrainingOptions()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="time to train for")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data order")
    parser.add_argument("--folder", type=Path, default=defaults.folder, help="where to write the model")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    Trainer(TrainingOptions(minutes=arguments.minutes, seed=arguments.seed, folder=arguments.folder)).run()


if __name__ == "__main__":
    main()
