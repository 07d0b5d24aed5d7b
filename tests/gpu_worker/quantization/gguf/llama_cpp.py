"""llama.cpp's own tools, where its sources are on this machine: that of the benchmarks, or what a variable names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.quantization.gguf import llama_cpp_converter
from tests.gpu_worker.quantization.gguf.converted import Converted, random_model
from tests.gpu_worker.quantization.gguf.written_file import written

VARIABLE = "HEADRACE_LLAMA_CPP"
"""Names a folder of llama.cpp's sources; what it built is in `build` there."""

_BENCH = Path.home() / ".cache/headrace/bench/llama"
_TIMEOUT_S = 600
_WORDS = [f"w{index}" for index in range(2, SIZES["vocab_size"])]
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": index, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for index, token in enumerate(("<|endoftext|>", "<|user|>"))
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(("<|endoftext|>", "<|user|>", *_WORDS))},
        "merges": [],
    },
}


@dataclass(frozen=True)
class LlamaCpp:
    """Where the sources are, and the program that quantizes, if it was built."""

    sources: Path
    quantizer: Path | None


def find_llama_cpp() -> LlamaCpp | None:
    """Return the tools; None where there are no sources."""
    named = os.environ.get(VARIABLE)
    sources = [Path(named)] if named else sorted(_BENCH.glob("src/llama_cpp_python*/vendor/llama.cpp"))
    found = next((path for path in sources if (path / "convert_hf_to_gguf.py").exists()), None)
    if found is None:
        return None
    programs = [folder / "build/bin/llama-quantize" for folder in (found, _BENCH)]
    return LlamaCpp(found, next((path for path in programs if path.exists()), None))


def save_checkpoint(case: Converted, directory: Path) -> Any:
    """Save a random model as a published checkpoint of its family is, with a small vocabulary; return the model."""
    model = random_model(case)
    model.save_pretrained(directory)
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **case.published}
    absent = {name for name, value in case.published.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in absent}))
    (directory / llama_cpp_converter.PUBLISHED).write_text(json.dumps(dict(case.published)))
    write_tokenizer(directory)
    return model


def write_tokenizer(directory: Path) -> None:
    """Write a vocabulary of numbered words."""
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class Job:
    """A model to convert to a target of a type, with options of the converter."""

    model: Path
    target: Path
    kind: str = "f32"
    options: Mapping[str, bool] = field(default_factory=dict)


def convert(tools: LlamaCpp, jobs: Sequence[Job], work: Path) -> dict[str, str]:
    """Convert models, and return what went wrong with which target."""
    listed = work / "jobs.json"
    listed.write_text(json.dumps([[str(job.model), str(job.target), job.kind, dict(job.options)] for job in jobs]))
    command = [sys.executable, llama_cpp_converter.__file__, str(tools.sources), str(listed)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    failures: dict[str, str] = json.loads(outcome.stdout.splitlines()[-1])
    return failures


def quantize(tools: LlamaCpp, source: Path, target: Path, kind: str) -> None:
    """Quantize a file by llama.cpp's own program."""
    command = [str(tools.quantizer), str(source), str(target), kind, "2"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert outcome.returncode == 0, (outcome.stdout + outcome.stderr)[-4000:]


def dequantize(source: Path, target: Path) -> set[str]:
    """Write the file that `gguf`, the package, makes of another one's numbers in F32; return the types that it had."""
    reader = gguf.GGUFReader(source)
    with written(target, reader.fields["general.architecture"].contents()) as writer:
        for name, entry in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    return {tensor.tensor_type.name for tensor in reader.tensors}
