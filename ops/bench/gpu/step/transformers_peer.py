"""`transformers` on the same weights: the oracle of logits, and the baseline of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from ops.bench.gpu.shapes import ModelShape

# Not typed to the end.
transformers: Any = import_module("transformers")

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
        max_model_len: int,
        attention: str = "sdpa",
    ) -> None:
        """Build the model around `tensors`, which have the names of its checkpoints."""
        config = transformers.AutoConfig.for_model(
            "qwen3" if shape.has_qk_norm else "llama",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            max_position_embeddings=max_model_len,
            tie_word_embeddings=shape.ties_embeddings,
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        model.load_state_dict(tensors, assign=True, strict=not shape.ties_embeddings)
        model.tie_weights()
        # The frequencies are no parameters: they are computed where the module is made.
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self._model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor, num_last: int = 0) -> torch.Tensor:
        """Return the logits of a prompt `[num_tokens]`, of its last tokens or, by default, of all."""
        result: torch.Tensor = self._model(token_ids[None], use_cache=False, logits_to_keep=num_last).logits[0]
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
        outputs = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, record_timestamps=True
        )
        done = [output for output in outputs.values() if len(output.generated_tokens) == num_new]
        if len(done) != len(prompts):
            raise RuntimeError(f"generate_batch finished {len(done)} of {len(prompts)} prompts")
        return done
