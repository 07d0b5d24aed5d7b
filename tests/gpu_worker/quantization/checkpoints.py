"""Small quantized checkpoints, and the model of `transformers` on the dense weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import SIZES, new_model, oracle_logits, randomize
from tests.gpu_worker.quantization.packers import PackedLayer

CPU = torch.device("cpu")
TOLERANCE = 1e-4
TOKENS = torch.randint(90, (40,), generator=torch.Generator().manual_seed(3))

# Packs the layer of a name, or leaves it alone.
Pack = Callable[[str, torch.Tensor], PackedLayer | None]


class Made(NamedTuple):
    """A checkpoint, and the oracle's model of it."""

    directory: Path
    oracle: Any

    def load(self, dtype: torch.dtype = torch.float32) -> CausalLM:
        return load_model(self.directory, dtype, CPU)

    def change_config(self, **changes: Any) -> None:
        """Change fields of `quantization_config`; None removes one."""
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"].update(changes)
        path.write_text(json.dumps(config))

    def change_tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.directory / "model.safetensors")
        change(tensors)
        save_file(tensors, self.directory / "model.safetensors")

    def refusal(self) -> str:
        """Return the error of loading the checkpoint, which must fail."""
        with pytest.raises(CheckpointError) as raised:
            self.load()
        return str(raised.value)

    def refusal_with(self, name: str, tensor: torch.Tensor | None) -> str:
        """Do the same with one tensor replaced, or without it; it must be named."""
        self.change_tensors(lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
        refusal = self.refusal()
        assert repr(name) in refusal
        return refusal


def make_checkpoint(
    directory: Path, quantization: Mapping[str, Any], pack: Pack, family: str = "Llama", **options: Any
) -> Made:
    """Save a random model, its linear layers packed by `pack`; `lm_head` is one of them."""
    model = new_model(family, {**SIZES, "vocab_size": 96, "num_hidden_layers": 2, **options}, seed=11)
    config = model.config
    randomize(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, module in model.named_modules():
        if f"{name}.gate_up_proj" in tensors:
            _pack_experts(name, module, tensors, pack)
        if not isinstance(module, torch.nn.Linear) or f"{name}.weight" not in tensors:
            continue
        layer = pack(name, module.weight.data)
        if layer is not None:
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": tensor for end, tensor in layer.tensors.items()}
            _replace(module, layer)
    model.config.save_pretrained(directory)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text())
    written |= {"architectures": [f"{family}ForCausalLM"], "quantization_config": dict(quantization)}
    (directory / "config.json").write_text(json.dumps(written))
    return Made(directory, model)


def _pack_experts(name: str, module: torch.nn.Module, tensors: dict[str, torch.Tensor], pack: Pack) -> None:
    """Give each expert tensors of its own, and the oracle what they stand for; inputs stay as they are."""
    gate_up, down = tensors.pop(f"{name}.gate_up_proj"), tensors.pop(f"{name}.down_proj")
    for expert in range(len(gate_up)):
        gate, up = gate_up[expert].chunk(2)
        dense = []
        for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
            layer = pack(f"{name}.{expert}.{part}", weight)
            stored = {"weight": weight.clone()} if layer is None else layer.tensors
            tensors |= {f"{name}.{expert}.{part}.{end}": tensor for end, tensor in stored.items()}
            dense.append(weight if layer is None else layer.dense)
        module.gate_up_proj.data[expert] = torch.cat(dense[:2])
        module.down_proj.data[expert] = dense[2]


def _replace(module: torch.nn.Linear, layer: PackedLayer) -> None:
    module.weight.data.copy_(layer.dense)
    if (inputs := layer.inputs) is not None:
        module.register_forward_pre_hook(lambda _, given: (inputs(given[0]),))


def but_head(pack: Callable[[torch.Tensor], PackedLayer]) -> Pack:
    """Pack every layer alike but the head, which most tools leave alone."""
    return lambda name, weight: None if name == "lm_head" else pack(weight)


def logits_of(model: CausalLM, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Score a prompt in two chunks, then token by token."""
    run = PagedRun(model, [tokens])
    steps = [13, len(tokens) - 16, 1, 1, 1]
    return torch.cat([run.step({0: count})[0] for count in steps])


def assert_equals_oracle(made: Made) -> None:
    expected = oracle_logits(made.oracle, TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(made.load()), expected, atol=TOLERANCE, rtol=0)


def assert_near_oracle_with_rounded_inputs(made: Made) -> None:
    """Where inputs are rounded, a last bit can move one of them by a whole step: not equal, but all but equal.

    What is far from the oracle is the same model without rounding.
    """
    expected = oracle_logits(made.oracle, TOKENS)
    error = (logits_of(made.load()) - expected).abs().mean() / expected.std()
    for module in made.oracle.modules():
        module._forward_pre_hooks.clear()
    unrounded = (oracle_logits(made.oracle, TOKENS) - expected).abs().mean() / expected.std()
    assert error < unrounded / 5, f"{error} is not far below {unrounded}"
