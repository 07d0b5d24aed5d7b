"""The job of quantizing a model, layer by layer in bounded memory.

The folder gets its `config.json` last: until then no engine takes it for a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import LinearShape, feature_factors
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import take_positions
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from kernels.linear.forms import DenseWeight
from ops.quantize.folder import QuantizedFolder, StoredNames, read_all
from ops.quantize.job_settings import QuantizeJob, calibration_windows, check_job
from ops.quantize.layer_blocks import is_of_expert, kept_modules, matrices, matrix_of, with_matrix
from ops.quantize.layer_pass import LayerPass, check_stream_fits, num_kept, take_token_vectors
from ops.quantize.methods import HEAD, Inputs, Method, make_method
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a job is: `done` of `total` matrices, the last of which was `name`.

    Attributes:
        is_unseen: The method looks at inputs, and the matrix was given none: no token was routed to its expert.
    """

    done: int
    total: int
    name: str
    is_unseen: bool = False


def quantize(job: QuantizeJob) -> Iterator[Advance]:
    """Do the job, reporting after each matrix; `HeadraceError` if the model or the job cannot be used."""
    if find_gguf(job.model) is not None:
        problem = f"{job.model} is a GGUF file, which is served as it is; quantize a directory in Hugging Face's format"
        raise ConfigError("HEADRACE_MODEL", problem)
    config = read_model_config(job.model)
    method = make_method(job.method, job.group_size)
    check_job(config, job, method)
    folder = QuantizedFolder(job.out, config.num_layers)
    names = [matrices(layer, config) for layer in config.layers]
    total = sum(map(len, names))
    own = config.block.names
    opened = Checkpoint(job.model, torch.float32, torch.device(job.device), renamed=own.renamed, unused=own.unused)
    # In its own names.
    as_stored = Checkpoint(job.model, torch.float32, torch.device("cpu"))
    with opened as checkpoint, as_stored as stored, torch.inference_mode():
        keeper = _Keeper(config, method, stored)
        layer_pass = _layer_pass(job, config, checkpoint) if method.needs_inputs else None
        for index in range(config.num_layers):
            done = sum(map(len, names[:index]))
            weights = config.take_layer(config.layer_source(checkpoint), index)
            inputs = None if layer_pass is None else layer_pass.observe(index, weights, names[index])
            rounding = _LayerRounding(method, config, names[index], weights, inputs)
            for count, name in enumerate(names[index], 1):
                rounding.round(name)
                is_unseen = inputs is not None and not inputs[name].num_tokens
                yield Advance(done + count, total, f"layer {index}, {name}", is_unseen)
            folder.write_layer(index, keeper.whole_layer(index, rounding))
            if layer_pass is not None:
                layer_pass.advance(index, rounding.weights)
        folder.write_rest(keeper.rest(job, checkpoint))
        # The last names of linear layers that stay are the same in the checkpoint's names and the engine's.
        patterns = [rf"re:.*\.{name}$" for name in kept_modules(config)]
        ignored = [*keeper.names.left_alone(stored), *patterns]
    untied = {"tie_word_embeddings": False} if job.lm_head else {}
    folder.finish(job.model, method.config(job.lm_head, ignored), untied)


class _LayerRounding:
    """One layer on its way: `weights` has the rounded matrices in place of those that were rounded.

    Attributes:
        matrices: All matrices to round, by name.
        tensors: Stored tensors of the rounded matrices, for each module by its name within the layer.
    """

    def __init__(
        self,
        method: Method,
        config: ModelConfig,
        matrices: Mapping[str, LinearShape],
        weights: LayerWeights,
        inputs: Inputs | None,
    ) -> None:
        self._method = method
        self._config = config
        self.matrices = matrices
        self.weights, self._inputs = weights, inputs
        self.tensors: dict[str, Mapping[str, torch.Tensor]] = {}

    def round(self, name: str) -> None:
        projection, linear = matrix_of(self.weights, name), self.matrices[name]
        moments = None if self._inputs is None else self._inputs[name]
        weight, order = projection.weight.dequantize(), linear.order
        if order is not None:
            weight = weight[torch.argsort(order).to(weight.device)]
        factors = feature_factors(linear.scales)
        if factors is not None:
            weight = weight / factors.to(weight.device)[:, None]
        matrix = self._method.round(weight, moments)
        parts = zip(linear.modules, matrix.split(linear.rows), strict=True)
        self.tensors |= {module: self._method.tensors(rows) for module, rows in parts}
        if is_of_expert(name) and projection.bias is not None:
            self._add_biases(linear, projection.bias)
        dense = matrix.dequantize()
        if factors is not None:
            dense = dense * factors.to(dense.device)[:, None]
        rounded = replace(projection, weight=DenseWeight(dense if order is None else dense[order.to(dense.device)]))
        self.weights = with_matrix(self.weights, name, rounded)

    def _add_biases(self, linear: LinearShape, bias: torch.Tensor) -> None:
        """Store an expert's biases beside its matrices: the stack that held those of all is not written."""
        parts = bias.to(self._config.dtype).split_with_sizes(list(linear.rows))
        for module, part in zip(linear.modules, parts, strict=True):
            self.tensors[module] = {**self.tensors[module], "bias": part}


class _Keeper:
    """Puts rounded matrices beside what stays as the checkpoint has it, all in the checkpoint's names."""

    def __init__(self, config: ModelConfig, method: Method, stored: Checkpoint) -> None:
        self._config = config
        self._method = method
        self._stored = stored
        self.names = StoredNames(stored.names(), config)

    def whole_layer(self, index: int, rounding: _LayerRounding) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}."
        modules = [prefix + module for module in rounding.tensors]
        tensors = read_all(self._stored, self.names.of_layer(index, modules))
        for module, parts in rounding.tensors.items():
            own = self.names.module(prefix + module)
            tensors |= {f"{own}.{suffix}": tensor for suffix, tensor in parts.items()}
        return tensors

    def rest(self, job: QuantizeJob, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        tensors = read_all(self._stored, self.names.outside_layers(has_head=job.lm_head))
        if job.lm_head:
            config = self._config
            name = "model.embed_tokens" if config.tie_word_embeddings else HEAD
            head = checkpoint.take(f"{name}.weight", config.vocab_size, config.hidden_size).float()
            own = self.names.module(HEAD)
            tensors |= {f"{own}.{suffix}": tensor for suffix, tensor in self._method.head_tensors(head).items()}
        return tensors


def _layer_pass(job: QuantizeJob, config: ModelConfig, checkpoint: Checkpoint) -> LayerPass:
    assert job.calibration is not None
    length = min(job.window, config.max_model_len)
    check_stream_fits(job.samples, length, config.hidden_size + num_kept(config), free_host_bytes())
    tokenizer = ModelTokenizer(read_model_directory(job.model))
    windows = calibration_windows(tokenizer, job.calibration, job.samples, length)
    embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size).cpu()
    embedded = torch.nn.functional.embedding(windows, embedding) * config.block.embedding_scale
    if (positions := take_positions(config, checkpoint)) is not None:
        embedded += positions[:length].cpu()
    device = torch.device(job.device)
    vectors = take_token_vectors(config, checkpoint, windows, embedding, device)
    return LayerPass(config, embedded, device, vectors)
