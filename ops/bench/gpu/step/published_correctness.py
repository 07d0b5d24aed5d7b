"""Whether steps of models with experts are right: logits in float32 against transformers, on two layers.

In 16 bits two right implementations choose other experts for some tokens, whose scores differ by less than rounding;
what such a token yields is then another vector. In float32 that is rare, and tokens whose choice is so close are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from ops.bench.gpu.published import PublishedShape
from ops.bench.gpu.step.correctness import paged_logits, share_of_other_tokens
from ops.bench.gpu.step.published_model import published_model
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine

# Not typed to the end.
transformers: Any = import_module("transformers")

_CODES = "quantization_config"
# Scores of the last expert that is chosen and of the first that is not, apart by less: rounding may choose either.
_CLOSE = 1e-4
# Of the tokens, those that may be left out.
_MAX_LEFT_OUT = 0.1


class UnclearRoutingError(RuntimeError):
    """So many tokens' experts are chosen by differences within rounding that little would be compared."""


def logits_error(device: torch.device, shape: PublishedShape, lengths: tuple[int, ...]) -> float:
    """Return the largest relative error of a token's logits, in float32, over tokens whose routing is clear.

    Prompts are computed in chunks, beside one another, and their last tokens as decodes.

    Raises:
        UnclearRoutingError: A tenth of the tokens is not clear.
    """
    max_len = max(lengths)
    model, weights = published_model(shape, max_len, device, torch.float32, keeps_tensors=True)
    peer = RoutedPeer(shape, weights.tensors, device)
    prompts = [torch.randint(model.config.vocab_size, (length,), device=device) for length in lengths]
    cache = StepEngine(model, EngineSizes(len(lengths), max_len, has_graphs=False)).cache
    actual = paged_logits(model, cache, prompts)
    errors = []
    for prompt, ours in zip(prompts, actual, strict=True):
        expected, margins = peer.logits(prompt)
        clear = (ours - expected)[margins > _CLOSE].double().norm(dim=1)
        if len(clear) < (1 - _MAX_LEFT_OUT) * len(prompt):
            raise UnclearRoutingError(f"{len(prompt) - len(clear)} of {len(prompt)} tokens have no clear experts")
        errors.append((clear / expected[margins > _CLOSE].double().norm(dim=1)).max())
    return float(torch.stack(errors).max())


def graphs_error(device: torch.device, shape: PublishedShape, num_seqs: int, prompt_len: int, num_new: int) -> float:
    """Return the share of greedy tokens in 16 bits that differ between the engine with graphs and without."""
    model, _ = published_model(shape, prompt_len + num_seqs + num_new, device)
    return share_of_other_tokens(model, num_seqs, prompt_len, num_new)


class RoutedPeer:
    """A model of transformers in float32, and by how much its routers prefer the experts that they choose.

    Attributes:
        model: Around our tensors, not copies.
    """

    def __init__(self, shape: PublishedShape, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Build the model around `tensors`, which have the names of its parameters."""
        fields = shape.without(_CODES).config()
        config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            )
        model.load_state_dict(tensors, assign=True)
        # The frequencies are no parameters: they are computed where the module is made.
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self.model = model.eval().requires_grad_(False)
        self._top_k: int = config.num_experts_per_tok
        self._margins: list[torch.Tensor] = []
        for module in self.model.modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._keep_margins)

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a prompt, and by how much each token's routing is clear, in the layer with the least.

        Shapes:
            token_ids: `[num_tokens]`
            result: `[num_tokens, vocab_size]` and `[num_tokens]`
        """
        self._margins.clear()
        with _full_precision():
            logits: torch.Tensor = self.model(token_ids[None], use_cache=False).logits[0]
        return logits, torch.stack(self._margins).amin(0)

    def _keep_margins(self, module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        best = output[0].topk(self._top_k + 1, dim=-1).values
        self._margins.append(best[:, -2] - best[:, -1])


@contextmanager
def _full_precision() -> Iterator[None]:
    """Let products and convolutions of float32 keep all digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
