"""Makes the checkpoints that `ops.bench.quant` measures: a model by every method of `headrace quantize`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.demo_model.corpus import training_files
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob

PLAIN = "bf16"
METHODS = ("int8", "fp8", "rtn-int4", "gptq")
# After a method's name: the head is rounded too.
HEAD = "+head"
_METHODS_WITH_HEAD = tuple(f"{name}{HEAD}" for name in METHODS)
GROUP_SIZE = 64
_NUM_TRAINING_CHARACTERS = 400_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the methods that look at inputs run through the model."""

    text: Path
    samples: int
    window: int


def all_methods() -> list[str]:
    """Return every method by its name, and again with a rounded head."""
    return [*METHODS, *_METHODS_WITH_HEAD]


def make_checkpoints(
    model: Path, folder: Path, methods: list[str], calibration: Calibration
) -> Iterator[tuple[str, Path]]:
    """Quantize a model by each method, one after another; yields name and directory of each."""
    for name in methods:
        out, method = folder / name, name.removesuffix(HEAD)
        windows = (calibration.text, calibration.samples, calibration.window)
        job = QuantizeJob(model, out, method, GROUP_SIZE, *windows, "cpu", lm_head=method != name)
        for _ in quantize(job):
            pass
        yield name, out


def random_words(vocab_size: int, target: Path) -> Calibration:
    """Write words of `make_model`'s tokenizer: speed does not depend on what weights are rounded to."""
    generator = random.Random(0)
    target.write_text(" ".join(f"w{generator.randrange(3, vocab_size)}" for _ in range(256)))
    return Calibration(target, samples=4, window=64)


def training_text(target: Path) -> Calibration:
    """Write text that the demo model was trained on, of files chosen at random."""
    files = training_files()
    random.Random(0).shuffle(files)
    parts: list[str] = []
    while sum(map(len, parts)) < _NUM_TRAINING_CHARACTERS:
        parts.append(files.pop().read_text(encoding="utf-8", errors="replace"))
    target.write_text("".join(parts)[:_NUM_TRAINING_CHARACTERS], encoding="utf-8")
    return Calibration(target, samples=64, window=512)


def weight_bytes(model: Path) -> int:
    """Return the size of a model's weights on disk: a directory's, or a file's."""
    files = model.glob("*.safetensors") if model.is_dir() else (model,)
    return sum(file.stat().st_size for file in files)
