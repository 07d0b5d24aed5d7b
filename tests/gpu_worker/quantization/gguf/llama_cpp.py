"""llama.cpp's own tools, where its sources are on this machine: that of the benchmarks, or what a variable names."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.gpu_worker.models.families.random_models import SIZES, randomize_all
from tests.gpu_worker.models.variants import new_model
from tests.gpu_worker.quantization.gguf import llama_cpp_converter
from tests.gpu_worker.quantization.gguf.converted import Converted

VARIABLE = "HEADRACE_LLAMA_CPP"
"""Names a folder of llama.cpp's sources; what it built is in `build` there."""

_BENCH = Path.home() / ".cache/headrace/bench/llama"
_TIMEOUT_S = 600
# Families whose normalisations are stored less one.
_LESS_ONE = ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "Gemma", "Gemma2", "Gemma3Text", "Nemotron")
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


def save_checkpoint(case: Converted, directory: Path, options: Mapping[str, Any]) -> Any:
    """Save a random model as a published checkpoint of its family is, with a small vocabulary; return the model.

    Args:
        case: The family.
        directory: Where to.
        options: Go before those of the family.
    """
    # A copy: `transformers` changes what it is given.
    values = copy.deepcopy({**SIZES, **case.options, **options})
    model = new_model(case.family, values, seed=len(repr(case)), model=case.model)
    model.config._experts_implementation = "eager"
    randomize_all(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-2, 1)
            elif ".experts." in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif name == "lm_head.weight":
                # Rounding grows with the logits, which need not be large.
                parameter.mul_(0.35)
            elif case.family in _LESS_ONE and "norm" in name and "linear_attn" not in name:
                parameter.sub_(1 if name.endswith("weight") else 0)
    model.save_pretrained(directory)
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **case.published}
    absent = {name for name, value in case.published.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in absent}))
    (directory / llama_cpp_converter.PUBLISHED).write_text(json.dumps(dict(case.published)))
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def convert(tools: LlamaCpp, jobs: Sequence[tuple[Path, Path, str]], work: Path) -> dict[str, str]:
    """Convert models to targets of types, and return what went wrong with which target."""
    listed = work / "jobs.json"
    listed.write_text(json.dumps([[str(model), str(target), kind] for model, target, kind in jobs]))
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
    writer: Any = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {tensor.tensor_type.name for tensor in reader.tensors}
