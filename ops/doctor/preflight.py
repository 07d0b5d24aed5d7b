"""`headrace worker --check`: whether a worker with these settings could serve, found out without joining the fleet."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.quantization.gguf.model_file import SUFFIX
from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.model_revision import served_revision
from gpu_worker.start.nats_check import check_nats
from ops.doctor.finding import Finding, Level, exit_code, page, problem, warning
from ops.doctor.machine import machine_findings
from ops.doctor.nats import NatsLogin, nats_findings
from shared.errors import ConfigError, HeadraceError
from shared.model_hub import hub_id, local_model

if TYPE_CHECKING:
    from gpu_worker.text.model_directory import ModelDirectory
    from gpu_worker.text.tokenizer import ModelTokenizer


def preflight(config: WorkerConfig, as_given: Callable[[str], str]) -> int:
    """Print the findings, and return the exit status: 1 where this worker could not serve."""
    findings = list(_findings(config))
    print(page(findings, as_given))
    return exit_code(findings)


def _findings(config: WorkerConfig) -> Iterator[Finding]:
    yield from machine_findings(Path(), os.environ)
    of_model = list(_model_findings(config))
    yield from of_model
    name = None if config.model is None else _served_name(config, config.model)
    login = NatsLogin(config.nats_url, "worker", config.nats_user, config.nats_password, config, name, config.worker_id)
    found = asyncio.run(nats_findings(login))
    # The first worker of a fleet hears no other, and finds no queue that it would not make itself.
    yield from (Finding(one.topic, one.text) if one.level is Level.WARNING else one for one in found)
    # An unreadable model has no revision: report one cause once.
    is_readable = not any(one.topic == "model" and one.level is Level.PROBLEM for one in of_model)
    if is_readable and not any(one.level is Level.PROBLEM for one in found):
        yield _revision(config)


def _model_findings(config: WorkerConfig) -> Iterator[Finding]:
    """Report the model, the device and its memory without loading it; a model of the hub is downloaded."""
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
    from gpu_worker.models.loader import weights_bytes
    from gpu_worker.models.registry import read_model_config

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


def _served_name(config: WorkerConfig, path: Path) -> str:
    assert config.model is not None
    return config.served_model_name or hub_id(config.model) or path.resolve().name.removesuffix(SUFFIX)


def _revision(config: WorkerConfig) -> Finding:
    assert config.model is not None
    try:
        path = local_model(config.model, "HEADRACE_MODEL")
        name = _served_name(config, path)
        config = dataclasses.replace(config, model=path)
        identity = Identity("headrace-check", name, served_revision(config))
        check_nats(config, identity)
    except ConfigError as error:
        return problem("revision", error.problem)
    except HeadraceError as error:
        return problem("revision", str(error))
    return Finding("revision", f"{identity.revision} of {name!r}; no other worker contradicts it")
