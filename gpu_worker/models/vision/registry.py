"""How a model sees, from its directory: by the family that the checkpoint names."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import msgspec
import torch

from gpu_worker.core.scheduler_config import MediaConfig
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError, JsonFile, read_small_file
from gpu_worker.models.text_part import WRAPPERS, text_part
from gpu_worker.models.vision import families
from gpu_worker.models.vision.processor import MediaProcessor, Resampling
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles
from gpu_worker.models.vision.weights import WeightTaker
from gpu_worker.quantization.gguf.model_file import find_gguf

_log = logging.getLogger(__name__)

VERSION = b"3"
"""Of how images are processed: part of what names them, so that a change makes other names."""
# As Pillow numbers them.
_RESAMPLINGS: Mapping[Resampling, int] = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
_PROCESSOR, _NEW_PROCESSOR = "preprocessor_config.json", "processor_config.json"


def find_vision_families() -> Mapping[str, VisionFamily]:
    """Return all families, by the names of their checkpoints in `architectures`."""
    modules = [import_module(f"{families.__name__}.{found.name}") for found in pkgutil.iter_modules(families.__path__)]
    found: list[VisionFamily] = [family for module in modules for family in module.FAMILIES]
    return {name: family for family in found for name in family.architectures}


FAMILIES = find_vision_families()


def read_vision(directory: Path) -> VisionConfig | None:
    """Read how a model sees; None for one that does not, or whose tower is not served: its text part is then."""
    try:
        files = _read_files(directory)
        if files is None:
            return None
        name = next(name for name in files.whole.texts("architectures") if name in FAMILIES)
        vision = FAMILIES[name].read(files)
        _check_resizing(files.processor, vision.form.resampling)
        return vision if _has_plain_tower(directory, vision) else None
    except CheckpointError as error:
        _log.warning("%s; the model is served for text alone, without its vision tower", error)
        return None


def read_processor(directory: Path) -> MediaProcessor | None:
    """Return what prepares images for a model; None for one that takes none."""
    vision = read_vision(directory)
    files = None if vision is None else _read_files(directory)
    if vision is None or files is None:
        return None
    fields = [dict(file.fields) for file in (files.vision, files.processor)]
    fingerprint = sha256(VERSION + msgspec.json.encode(fields, order="deterministic")).digest()
    return MediaProcessor(vision.form, fingerprint)


def load_tower(directory: Path, vision: VisionConfig, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Load the tower of a model; `CheckpointError` if a tensor is missing or has another shape."""
    with _open(directory, vision, dtype, device) as checkpoint:
        tower = vision.take(WeightTaker(checkpoint, device))
        checkpoint.check_all_taken()
    return tower


def tower_bytes(directory: Path, vision: VisionConfig, dtype: torch.dtype) -> int:
    """Return the memory of a tower's weights."""
    with _open(directory, vision, dtype, torch.device("cpu")) as checkpoint:
        return checkpoint.num_bytes_loaded(r"")


def _read_files(directory: Path) -> VisionFiles | None:
    if find_gguf(directory) is not None:
        return None
    whole = JsonFile.read(directory / "config.json")
    name = next((name for name in whole.texts("architectures") if name in FAMILIES), None)
    vision = whole.nested("vision_config")
    if name is None or vision is None:
        return None
    text, _ = text_part(whole, WRAPPERS[name])
    return VisionFiles(whole, vision, text, _read_processor(directory), _read_tokens(directory))


def _read_processor(directory: Path) -> JsonFile:
    """Read the image processor's fields, in the form of transformers 5, or the older one where that is absent."""
    new, old = directory / _NEW_PROCESSOR, directory / _PROCESSOR
    nested = JsonFile.read(new).nested("image_processor") if new.is_file() else None
    if nested is not None:
        return nested
    return JsonFile.read(old) if old.is_file() else JsonFile(old, {})


def _check_resizing(processor: JsonFile, resampling: Resampling) -> None:
    processor.require("do_resize", True, "images resized to sizes of the family")
    number, own = _RESAMPLINGS[resampling], processor.fields.get("resample")
    if own not in (None, number):
        raise processor.error("resample", f"is {str(own)[:40]}; images of this family are resized by {number} only")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _read_tokens(directory: Path) -> Mapping[str, int]:
    try:
        read = msgspec.json.decode(read_small_file(directory / "tokenizer.json"), type=_Tokenizer)
    except (OSError, msgspec.DecodeError):
        return {}
    return {token.content: token.id for token in read.added_tokens}


def _has_plain_tower(directory: Path, vision: VisionConfig) -> bool:
    """Whether the files hold a tower of floating point numbers; checkpoints of the text part alone have none."""
    with _open(directory, vision, torch.float32, torch.device("cpu")) as checkpoint:
        names = checkpoint.names()
        is_plain = checkpoint.is_plain()
    if names and not is_plain:
        _log.warning("%s has a vision tower that is quantized, which is not served; text is", directory)
    return bool(names) and is_plain


def _open(directory: Path, vision: VisionConfig, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    others = rf"(?!{vision.tensors}).*"
    return Checkpoint(directory, dtype, device, renamed=vision.renamed, unused=(others,))


def media_config(vision: VisionConfig, model: ModelConfig) -> MediaConfig:
    """Return what the scheduler knows of a tower beside a model."""
    whole = vision.max_rows if vision.form.is_bidirectional else 0
    return MediaConfig(vision.stages(_weights_per_token(model)), vision.max_kept_rows, whole)


def _weights_per_token(config: ModelConfig) -> int:
    names, size = config.block.names, config.hidden_size
    total = 0
    for layer in config.layers:
        total += sum(sum(linear.rows) * linear.columns for linear in layer.linears(names, size).values())
        if (mixture := layer.mixture) is not None:
            total += 3 * size * (mixture.rule.top_k * mixture.expert_size + mixture.shared_size)
    return max(1, total)
