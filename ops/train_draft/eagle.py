"""An EAGLE layer: predicts the target's next hidden vector from the last one and the token that followed it.

Entry `i` is made of hidden vector `i` and token `i + 1`; what the layer makes of it stands for hidden vector `i + 1`,
and the target's head tells token `i + 2` from that. Behind the first draft token the layer has only its own vectors to
go on, so training unrolls a few: step `s` sees the target's vectors up to `s - 1` places back, then its own.

Source: Li et al., arXiv 2401.15077 (smooth L1 on the vectors, divergence of the distributions, noise on the inputs);
the unrolling as in EAGLE-3, arXiv 2503.01840, figure 6. Deviates in the weights of the two losses: a vector that is
nearly right is worth nothing, the right token is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.registry import read_model_config
from gpu_worker.speculative.eagle.config import read_eagle_config
from ops.demo_model.architecture import FeedForward
from ops.train_draft.distillation import kl_divergences
from ops.train_draft.eagle_attention import EagleAttention
from ops.train_draft.rows import Batch
from ops.train_draft.target import Vocabulary
from shared.errors import ConfigError

_TAKEN_OVER = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
"""Fields of the target's `config.json` that hold for the layer, too."""
_FEATURE_WEIGHT = 0.1
_RIDGE = 1e-3
_NOISE = 0.1
"""Width of the uniform noise on the hidden vectors, as a multiple of their mean magnitude."""


class EagleLayer(nn.Module):
    """One decoder layer whose input is not normalised, as the first layer of EAGLE's checkpoints."""

    def __init__(self, target: ModelConfig) -> None:
        """Create a layer of the target's sizes."""
        super().__init__()
        self.self_attn = EagleAttention(target)
        self.post_attention_layernorm = nn.RMSNorm(target.hidden_size, target.rms_norm_eps)
        self.mlp = FeedForward(target.hidden_size, target.intermediate_size)


class EagleNetwork(nn.Module):
    """What is trained."""

    def __init__(self, target: ModelConfig) -> None:
        """Create the weights; `fit` estimates them better than noise does."""
        super().__init__()
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList([EagleLayer(target)])
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @torch.no_grad()
    def fit(self, embedded: Tensor, hidden: Tensor, wanted: Tensor) -> None:
        """Make `fc` alone the linear map that predicts the hidden vectors best, by least squares.

        Shapes:
            embedded, hidden, wanted: `[num_entries, hidden_size]`
        """
        inputs = torch.cat((embedded, hidden, torch.ones(len(hidden), 1)), -1).double()
        products = inputs.T @ inputs
        products.diagonal().add_(_RIDGE * products.diagonal().mean())
        solution = torch.linalg.solve(products, inputs.T @ wanted.double()).float()
        self.fc.weight.copy_(solution[:-1].T)
        self.fc.bias.copy_(solution[-1])

    def steps(self, embedded: Tensor, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yield what the layer makes of all entries as its first draft token, its second and so on.

        Places of step `s`, from 0, before place `s` mean nothing.

        Shapes:
            embedded, hidden: `[num_rows, num_entries, hidden_size]`, of each entry's token and hidden vector
            result: likewise
        """
        layer: Any = self.layers[0]
        cache = layer.self_attn.begin(embedded.shape[1])
        for _ in range(count):
            x = self.fc(torch.cat((embedded, hidden), -1)).float()
            x = x + layer.self_attn(x, cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            yield x
            hidden = F.pad(x, (0, 0, 1, 0))[:, :-1]


class EagleStudent:
    """The layer, with the target's embedding and head, which are not trained."""

    first_distance = 2

    def __init__(self, target: ModelConfig, vocabulary: Vocabulary, model: Path, num_steps: int, sample: Batch) -> None:
        """Create the network.

        Args:
            target: Configuration of the target.
            vocabulary: Its matrices.
            model: Its directory, from whose `config.json` rotary settings are taken over.
            num_steps: Draft tokens to unroll in training.
            sample: Rows to estimate the first weights from.
        """
        self._target = target
        self._vocabulary = vocabulary
        self._stored_config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._num_steps = num_steps
        self.module = EagleNetwork(target)
        entries = (self._embedded(sample), sample.hidden[:, :-1], sample.hidden[:, 1:])
        self.module.fit(*(vectors.flatten(0, 1) for vectors in entries))

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of the unrolled draft tokens."""
        wanted = batch.hidden[:, 1:]
        noise = (torch.rand_like(wanted) - 0.5) * (_NOISE * wanted.abs().mean())
        steps = self.module.steps(self._embedded(batch), batch.hidden[:, :-1] + noise, self._num_steps)
        # Places that all steps have.
        common = slice(self._num_steps - 1, None)
        ours = [made[:, common].flatten(0, 1) for made in steps]
        theirs, head = wanted[:, common].flatten(0, 1), self._vocabulary.head
        divergence = kl_divergences(ours, [head] * len(ours), theirs, head).mean()
        distance = torch.stack([F.smooth_l1_loss(vectors, theirs) for vectors in ours]).mean()
        return divergence + _FEATURE_WEIGHT * distance

    def draft_tokens(self, batch: Batch, count: int) -> Tensor:
        """Return the likeliest tokens, each predicted with the layer's own vectors for those before."""
        steps = self.module.steps(self._embedded(batch), batch.hidden[:, :-1], count)
        chosen = [F.linear(made, self._vocabulary.head).argmax(-1) for made in steps]
        # Draft token `g` behind place `p` was made at entry `p + g`.
        return torch.stack([F.pad(tokens.roll(-step, 1), (0, 1)) for step, tokens in enumerate(chosen)], -1)

    def config(self) -> dict[str, Any]:
        """Return the configuration of a Llama with this one layer."""
        return _layer_config(self._target, self._stored_config)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights under the names of EAGLE's checkpoints."""
        return dict(self.module.state_dict())

    def _embedded(self, batch: Batch) -> Tensor:
        return F.embedding(batch.token_ids[:, 1:], self._vocabulary.embedding)


def check_rotary_settings(model: Path) -> None:
    """Refuse a target whose rotary settings the layer's configuration cannot tell: it would be served with others.

    Raises:
        ConfigError: Names the target.
        HeadraceError: Its configuration is missing or damaged.
    """
    target, stored = read_model_config(model), JsonFile.read(model / "config.json")
    if target.rope is None:
        problem = f"{model} does not attend, and an EAGLE layer has its target's attention; train another HEADRACE_KIND"
        raise ConfigError("HEADRACE_TARGET", problem)
    file = JsonFile(stored.path, _layer_config(target, stored.fields))
    if read_eagle_config(file, target).layer.rope != target.rope:
        problem = f"{model} has rotary settings that an EAGLE layer cannot be served with; train another HEADRACE_KIND"
        raise ConfigError("HEADRACE_TARGET", problem)


def _layer_config(target: ModelConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": True,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        # The layer's own function, whatever the target's is.
        "hidden_act": "silu",
        # Where the target calls it otherwise.
        "max_position_embeddings": target.max_model_len,
        "tie_word_embeddings": target.tie_word_embeddings,
        "torch_dtype": "float16",
    } | {name: stored[name] for name in _TAKEN_OVER if name in stored}
