"""Which modules of the model the tensors of an adapter are beside, by their names.

Names are those of strangers: each is bounded, and belongs to one side of one module or is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_worker.adapters.config import AdapterError
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdapterTargets, ExpertModules
from gpu_worker.models.tensor_file import TensorFile
from gpu_worker.models.text_part import TOWERS
from shared.adapter_files import WEIGHTS_NAME

_ROOT = "base_model.model."
_TENSOR = re.compile(r"(.+?)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
# PEFT saves a copy of the model's own embedding or head beside an adapter of it.
_COPY = re.compile(r"(.+?)\.base_layer\.(weight|bias)")
# PEFT saves these whole where the vocabulary was resized.
_WORDS = re.compile(r".+\.(?:embed_tokens|lm_head|wte|embed_out)(?:\.modules_to_save)?\.(?:weight|bias)")
# Some of the expressions here take the square of a name's length.
_MAX_NAME = 512
# A matrix of one expert, or the stack of all of them, which PEFT's `target_parameters` names.
_EXPERTS = re.compile(r"(model\.layers\.\d+)\.(?:.+\.)?experts(\.\d+\..*|(?:\.base_layer)*)")
# What stands before the layers in models that wrap a decoder of text; others, such as those that draft, are not its.
_BEFORE = r"^(?:(?:model|language_model|text_model|decoder|llm|thinker|transformer)\.)*"
_WRAPPERS = re.compile(_BEFORE + r"(layers\.\d+\.|per_layer_model_projection$)")
_ENDS = re.compile(_BEFORE + rf"({EMBEDDING.rpartition('.')[2]}|{HEAD})")
_TOWER = re.compile("|".join(TOWERS))
# Routers have other names in checkpoints than in `transformers`.
_ROUTER = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.(?:gate|router)(?:\.layer)?")
# What latent attention multiplies into queries and values.
_ABSORBED = re.compile(r"model\.layers\.\d+\.self_attn\.kv_b_proj")


@dataclass(frozen=True, slots=True)
class Module:
    """The two matrices of a module, by their names in the file; `name` is the module's there."""

    name: str
    down: str
    up: str


def modules_of(file: TensorFile, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> dict[str, Module]:
    """Return the modules of a file by their names in the model; `AdapterError` if a tensor is of none."""
    found: dict[str, dict[str, str]] = {}
    for tensor in _own_tensors(file, renamed, targets):
        if "magnitude" in tensor:
            raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r}: DoRA is not served")
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            problem = "which is neither lora_A nor lora_B of a module"
            if _WORDS.fullmatch(tensor):
                problem += ": tokens that were added to the tokenizer, and embeddings that were trained whole, are not "
                problem += "served; if there are none, save it with save_embedding_layers=False"
            raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r}, {problem}")
        module, side = match[1], match[2]
        if found.setdefault(module, {}).setdefault(side, tensor) != tensor:
            raise AdapterError(f"{WEIGHTS_NAME} has lora_{side} of {module[:120]!r} twice")
    modules: dict[str, Module] = {}
    for module, sides in found.items():
        if len(sides) < 2:
            missing = "B" if "A" in sides else "A"
            raise AdapterError(f"{WEIGHTS_NAME} has no lora_{missing} of {module[:120]!r}")
        name = _own_name(module.removeprefix(_ROOT), renamed)
        if name in modules:
            raise AdapterError(f"{WEIGHTS_NAME} has two modules that are both the model's {name[:120]!r}")
        modules[name] = Module(module.removeprefix(_ROOT), sides["A"], sides["B"])
    return modules


def _own_tensors(file: TensorFile, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> list[str]:
    if any(len(tensor) > _MAX_NAME for tensor in file.tensors):
        raise AdapterError(f"{WEIGHTS_NAME} has a name of more than {_MAX_NAME} characters, which no module has")
    return [tensor for tensor in file.tensors if not _is_copy(file, tensor, renamed, targets)]


def _is_copy(file: TensorFile, tensor: str, renamed: tuple[tuple[str, str], ...], targets: AdapterTargets) -> bool:
    """Return whether a tensor is the model's own embedding or head; `AdapterError` if that has other sizes here."""
    match = _COPY.fullmatch(tensor)
    name = None if match is None else _own_name(match[1].removeprefix(_ROOT), renamed)
    if match is None or name not in (EMBEDDING, HEAD) or name not in targets.matrices:
        return False
    matrix = targets.matrices[name]
    sizes = (sum(matrix.rows), matrix.columns)
    shape = (sizes[::-1] if name == EMBEDDING else sizes)[: 2 if match[2] == "weight" else 1]
    if (own := file.tensors[tensor].shape) != shape:
        problem = f"of shape {list(own)[:8]}, but that of this model has {list(shape)}: it was resized, or is another's"
        raise AdapterError(f"{WEIGHTS_NAME} has {tensor[:120]!r} {problem}")
    return True


def _own_name(module: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """Return what the model calls a module: as its own checkpoint's are called, without what wraps the decoder.

    Raises:
        AdapterError: It is not of the text part. Layers of towers may have the same names as those of the decoder.
    """
    name = f"{module}.weight"
    for pattern, replacement in renamed:
        name = re.sub(pattern, replacement, name)
    if _TOWER.fullmatch(name):
        problem = "which is not of the model's text part: train an adapter of that alone, without towers and projectors"
        raise AdapterError(f"{WEIGHTS_NAME} has {module[:120]!r}, {problem}")
    module = name.removesuffix(".weight")
    if (end := _ENDS.fullmatch(module)) is not None:
        return HEAD if end[1] == HEAD else EMBEDDING
    return common_name(_WRAPPERS.sub(r"model.\1", module))


def common_name(module: str) -> str:
    """Return a name that is the same whatever the router of a layer is called."""
    match = _ROUTER.fullmatch(module)
    return module if match is None else f"{match[1]}.router"


def experts_of(name: str, module: Module, targets: AdapterTargets) -> ExpertModules:
    """Return the experts whose stack a module is that is none of the model's matrices."""
    problem = "but the model has no such linear layer that an adapter can be beside; was it made for another?"
    match = _EXPERTS.fullmatch(name)
    if _ABSORBED.fullmatch(name):
        problem = "but no adapter can be beside the kv_b_proj of latent attention: train it without"
    if match is not None and match[1] in targets.experts:
        experts, is_stack = targets.experts[match[1]], not re.match(r"\.\d", match[2])
        if experts is not None and is_stack:
            return experts
        if experts is None:
            problem = "but experts cannot have adapters on a GPU: serve it on CPUs, or train it without them"
    raise AdapterError(f"{WEIGHTS_NAME} has {module.down[:120]!r}, {problem}")
