"""`transformers` on the same weights: the oracle of logits, and the baseline of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from ops.bench.gpu.shapes import ModelShape

# Not typed to the end.
transformers: Any = import_module("transformers")

_CODES = "quantization_config"
_PAGE_SIZE = 256
_TOKEN_BUDGET = 8192


def best_attention() -> str:
    """Return the fastest attention that transformers can use here."""
    if transformers.utils.is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if transformers.utils.is_flash_attn_2_available() else "sdpa"


class TransformersPeer:
    """A model of transformers whose parameters are our tensors, not copies."""

    def __init__(
        self,
        shape: ModelShape,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        attention: str = "sdpa",
        dtype: torch.dtype = torch.bfloat16,
        **implementations: str,
    ) -> None:
        known = shape.without(_CODES).config()
        config = transformers.CONFIG_MAPPING[known["model_type"]].from_dict(known)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, **implementations
            )
        is_tied = known["tie_word_embeddings"]
        model.load_state_dict(tensors, assign=True, strict=not is_tied)
        model.tie_weights()
        # The frequencies are not parameters: they are computed where the module is made.
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self.model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor, num_last: int = 0) -> torch.Tensor:
        """Return the logits of a prompt `[num_tokens]`, of its last tokens or, by default, of all."""
        result: torch.Tensor = self.model(token_ids[None], use_cache=False, logits_to_keep=num_last).logits[0]
        return result

    def decode_steps(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """Return the seconds between tokens while all prompts decode together, by continuous batching.

        Raises:
            RuntimeError: They never did, or some were not answered.
        """
        stamps = [output.timestamps for output in self._generate(prompts, num_steps + 1)]
        latest = max(stamps, key=lambda times: times[0])
        end = min(times[-1] for times in stamps)
        seconds = [later - earlier for earlier, later in pairwise(latest) if later <= end]
        if not seconds:
            raise RuntimeError(f"generate_batch finished a prompt before all {len(prompts)} decoded; add steps")
        return seconds

    def serve_s(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds from the first prompt's arrival to the last token, by continuous batching."""
        outputs = self._generate(prompts, num_new)
        started = min(float(output.created_time) for output in outputs)
        return max(float(output.timestamps[-1]) for output in outputs) - started

    def _generate(self, prompts: list[list[int]], num_new: int) -> list[Any]:
        config = transformers.GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        longest = max(map(len, prompts)) + num_new
        # As much memory as the load needs, and as many tokens a step as ours: it would take nearly all there is.
        sizes = {"num_blocks": len(prompts) * (-(-longest // _PAGE_SIZE) + 1), "max_batch_tokens": _TOKEN_BUDGET}
        known = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
        sizes["page_size" if "page_size" in known else "block_size"] = _PAGE_SIZE
        batching = transformers.ContinuousBatchingConfig(**sizes)
        outputs = self.model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, record_timestamps=True
        )
        done = [output for output in outputs.values() if len(output.generated_tokens) == num_new]
        if len(done) != len(prompts):
            raise RuntimeError(f"generate_batch finished {len(done)} of {len(prompts)} prompts")
        return done


class RoutedPeer(TransformersPeer):
    """A model with experts in float32, and by how much its routers prefer the experts that they choose."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        super().__init__(shape, tensors, device, "eager", torch.float32, experts_implementation="eager")
        self._top_k: int = self.model.config.num_experts_per_tok
        self._margins: list[torch.Tensor] = []
        for module in self.model.modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._keep_margins)

    def logits_and_margins(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a prompt, and by how much each token's routing is clear, in the layer with the least.

        Shapes:
            token_ids: `[num_tokens]`
            result: `[num_tokens, vocab_size]` and `[num_tokens]`
        """
        self._margins.clear()
        with _full_precision():
            logits = self.logits(token_ids)
        return logits, torch.stack(self._margins).amin(0)

    def _keep_margins(self, module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        best = output[0].topk(self._top_k + 1, dim=-1).values
        self._margins.append(best[:, -2] - best[:, -1])


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
