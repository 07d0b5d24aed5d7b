"""Whether a worker with these settings could load its model here, found out without loading it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.start.config import WorkerConfig
from ops.doctor.finding import Finding, Level, problem, warning
from shared.errors import HeadraceError
from shared.model_hub import hub_id, local_model

if TYPE_CHECKING:
    from gpu_worker.text.model_directory import ModelDirectory
    from gpu_worker.text.tokenizer import ModelTokenizer


def model_findings(config: WorkerConfig) -> Iterator[Finding]:
    """Yield what there is to say of the model, the device and its memory; a model of the hub is downloaded."""
    from gpu_worker.text.model_directory import read_model_directory
    from gpu_worker.text.tokenizer import ChatSettings, ModelTokenizer
    from gpu_worker.text.vocabulary_check import check_vocabulary

    if config.model is None:
        yield problem("model", "none is named", "give --model: a directory, a .gguf file, or an id at the hub")
        return
    try:
        is_of_hub = hub_id(config.model) is not None
        path = local_model(config.model, "HEADRACE_MODEL")
        directory = read_model_directory(path)
        tokenizer = ModelTokenizer(directory, ChatSettings(config.chat_format, config.allow_chat_template))
        check_vocabulary(tokenizer, directory)
    except HeadraceError as error:
        yield problem("model", str(error))
        return
    origin = f"{config.model} from the hub, " if is_of_hub else ""
    sizes = f"{directory.vocab_size} tokens, context {directory.max_model_len}, markup {tokenizer.chat_format}"
    yield Finding("model", f"{origin}{path}: {sizes}")
    if config.simulate is not None:
        yield Finding("device", "none: the engine is simulated")
    elif importlib.util.find_spec("torch") is None:
        yield problem("device", "PyTorch is not installed", "pip install 'headrace[worker]', or 'headrace[gpu]'")
    else:
        found = list(_device_and_memory(config, path))
        yield from found
        if all(one.level is not Level.PROBLEM for one in found):
            yield _sizes(dataclasses.replace(config, model=path), directory, tokenizer)


def _sizes(config: WorkerConfig, directory: ModelDirectory, tokenizer: ModelTokenizer) -> Finding:
    from gpu_worker.start.engine_setup import check_engine

    try:
        tokens = check_engine(config, directory, tokenizer)
    except HeadraceError as error:
        return problem("sizes", str(error))
    if tokens is None:
        return Finding("sizes", "go together; the KV cache of a GPU is what its load leaves")
    return Finding("sizes", f"go together; the KV cache holds {tokens} tokens")


def _device_and_memory(config: WorkerConfig, path: Path) -> Iterator[Finding]:
    import torch

    from gpu_worker.layers.free_memory import free_host_bytes
    from gpu_worker.models.registry import read_model_config
    from gpu_worker.models.weights_size import weights_bytes

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        remedy = "check the driver (`nvidia-smi`) and that PyTorch is a CUDA build, or choose --device cpu"
        yield problem("device", f"cuda is asked for, and PyTorch {torch.__version__} finds none", remedy)
        return
    device = torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info()
        room = int(whole * config.gpu_memory_utilization) - (whole - free)
        name = f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"
    else:
        room = free_host_bytes()
        name = f"cpu, {torch.get_num_threads()} threads, {room / 2**30:.1f} GiB free"
    yield Finding("device", name)
    try:
        model = read_model_config(path)
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        needed = weights_bytes(path, dtype, device, is_tied=model.tie_word_embeddings, names=model.block.names)
    except HeadraceError as error:
        yield problem("weights", str(error))
        return
    text = f"{needed / 2**30:.2f} GiB of weights in {room / 2**30:.1f} GiB; the rest is KV cache and working memory"
    if needed > room:
        yield problem("weights", text, "take a quantized or smaller model, or a device with more memory")
    elif needed > 0.8 * room:
        yield warning("weights", text, "little is left for the KV cache: few requests will run at once")
    else:
        yield Finding("weights", text)
