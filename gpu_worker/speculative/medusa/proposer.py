"""Drafts by heads, each of which predicts one token more from the hidden vector that the model computed last.

No pass of any model is needed, and no memory but what the last step of each sequence left. The heads know nothing of
each other, so their candidates are made into a tree: of all ways to combine them, those that are likeliest together.

Heads are read from the layout of the paper's authors (`0.0.linear.weight` …, in `medusa_lm_head.safetensors`) and from
the one that vLLM converts it to (`blocks.0.layers.0.weight` …, `lm_heads.0.weight`, in `model.safetensors`). A head
without a vocabulary matrix of its own uses the model's.

Source: Cai et al., "Medusa" (arXiv 2401.10774), sections 2.1 and 2.3; the tree is made anew for each draft, from the
heads' probabilities then, where the paper fixes it beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from pathlib import Path

import torch
import torch.nn.functional as F

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.execution.batch.transfers import Downloads
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.json_file import JsonFile
from gpu_worker.speculative.draft_files import open_draft_weights
from gpu_worker.speculative.likeliest_tree import likeliest_tree
from kernels.linear import Linear

WEIGHTS_FILE = "medusa_lm_head.safetensors"
"""What the paper's authors call it."""

_MAX_HEADS = 16
_MAX_BLOCKS = 16
_REMEDY = "take heads that were trained for this model"

MAX_CANDIDATES = 8
"""Of a head; those behind the eighth are rarely worth verifying."""


class MedusaHeads:
    """The heads of one model. Holds weights only.

    Attributes:
        device: Where they run.
        num_heads: Head `i` scores the token that lies `i + 2` behind the one whose hidden vector it is given.
    """

    def __init__(
        self,
        blocks: Values[Values[Linear]],
        vocabularies: Values[LMHead | None],
        model: CausalLM,
        dtype: torch.dtype,
    ) -> None:
        """Hold the heads.

        Args:
            blocks: The residual blocks, in order, at least one; the first yields the features of all heads, end to end,
                from their common input, and of each further one there is one a head.
            vocabularies: The heads' own matrices; None uses the model's.
            model: What the heads were trained for.
            dtype: What they compute in.
        """
        self.num_heads = len(vocabularies)
        self.device = model.device
        self._blocks = blocks
        self._vocabularies = vocabularies
        self._model_head = model.head_in(dtype)
        self._dtype = dtype

    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Score the vocabulary by the first `num_heads` heads.

        Shapes:
            hidden: `[num_rows, hidden_size]`, normalised as for the model's own head
            result: `[num_heads, num_rows, vocab_size]` float32
        """
        features = self._features(hidden.to(self._dtype), num_heads)
        own = self._vocabularies[:num_heads]
        if not any(own):
            return self._model_head(features.flatten(0, 1)).view(num_heads, len(hidden), -1)
        score = [self._model_head if head is None else head for head in own]
        return torch.stack([head(rows) for head, rows in zip(score, features, strict=True)])

    def _features(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return what the residual blocks make of the vectors, `[num_heads, num_rows, hidden_size]`."""
        first = self._blocks[0][0](hidden).view(len(hidden), self.num_heads, -1).transpose(0, 1)
        features = F.silu(first[:num_heads]) + hidden
        for block in self._blocks[1:]:
            products = [linear(rows) for rows, linear in zip(features, block[:num_heads], strict=True)]
            features = features + F.silu(torch.stack(products))
        return features


class MedusaProposer:
    """Keeps the last step, which computed every sequence that is decoding, until drafts are asked for."""

    wants_hidden = True

    def __init__(self, heads: MedusaHeads) -> None:
        """Draft by `heads`."""
        self._heads = heads
        self._downloads = Downloads(heads.device)
        self._last: Iterable[ComputedTokens] = ()

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the likeliest combinations of the heads' candidates."""
        drafts = [NO_DRAFT] * len(requests)
        found = {item.sequence: item for item in self._last}
        latest = [found.get(request.sequence) for request in requests]
        known = [
            (index, computed.hidden)
            for index, computed in enumerate(latest)
            if computed is not None and _reaches_end(computed, requests[index].sequence)
        ]
        if not known:
            return drafts
        most = max(requests[index].num_tokens for index, _ in known)
        rows = known[0][1][-1:] if len(known) == 1 else torch.stack([hidden[-1] for _, hidden in known])
        logits = self._heads.logits(rows, min(most, self._heads.num_heads))
        scores, token_ids = logits.topk(min(most, MAX_CANDIDATES, logits.shape[-1]))
        scores -= logits.logsumexp(dim=-1, keepdim=True)
        token_ids, scores = self._downloads.start([token_ids, scores]).wait()
        by_row = zip(token_ids.transpose(0, 1).tolist(), scores.transpose(0, 1).tolist(), strict=True)
        for (index, _), (candidates, log_probabilities) in zip(known, by_row, strict=True):
            drafts[index] = likeliest_tree(candidates, log_probabilities, requests[index].num_tokens)
        return drafts

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Keep the step; nothing is computed, nor looked at."""
        self._last = computed

    def forget(self, sequence: BatchSequence) -> None:
        """Drop what the step knows of a sequence."""
        self._last = [item for item in self._last if item.sequence is not sequence]


def _reaches_end(computed: ComputedTokens, sequence: BatchSequence) -> bool:
    """Say whether the sequence's last token is the one that follows what was computed."""
    return len(computed.hidden) > 0 and computed.start + len(computed.token_ids) == len(sequence.token_ids)


def load_medusa_heads(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Load the heads that were trained for `model`.

    Args:
        directory: Holds `config.json` and the weights.
        model: Gives device, sizes, and the vocabulary matrix where heads have none.
        dtype: What to compute in; None is the model's.

    Raises:
        CheckpointError: A file, field or tensor is missing, malformed, or of another model's size.
    """
    config = JsonFile.read(directory / "config.json")
    prefix = "medusa_" if "medusa_num_heads" in config.names() else ""
    num_heads = config.integer(f"{prefix}num_heads", maximum=_MAX_HEADS)
    num_blocks = config.integer(f"{prefix}num_layers" if prefix else "num_hidden_layers", 1, maximum=_MAX_BLOCKS)
    dtype = dtype or model.dtype
    with open_draft_weights(directory, dtype, model.device, WEIGHTS_FILE) as checkpoint:
        names = _Names(checkpoint, num_blocks)
        _check_size(checkpoint, names.block(0, 0), model)
        first = _take_block(checkpoint, [names.block(head, 0) for head in range(num_heads)], model)
        further = [
            [_take_block(checkpoint, [names.block(head, block)], model) for head in range(num_heads)]
            for block in range(1, num_blocks)
        ]
        vocabularies = [_take_vocabulary(checkpoint, names.vocabulary(head), model) for head in range(num_heads)]
        checkpoint.check_all_taken()
    return MedusaHeads([[first], *further], vocabularies, model, dtype)


class _Names:
    """What tensors are called in the layout at hand."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int) -> None:
        self._is_converted = checkpoint.has("blocks.0.layers.0.weight")
        self._num_blocks = num_blocks

    def block(self, head: int, block: int) -> str:
        return f"blocks.{head}.layers.{block}" if self._is_converted else f"{head}.{block}.linear"

    def vocabulary(self, head: int) -> str:
        return f"lm_heads.{head}.weight" if self._is_converted else f"{head}.{self._num_blocks}.weight"


def _take_block(checkpoint: Checkpoint, names: Values[str], model: CausalLM) -> Linear:
    """Take linear layers of the same input as one."""
    size = model.config.hidden_size
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(size, size)] * len(names))
    if not checkpoint.has(f"{names[0]}.bias"):
        return model.linears.make(weight)
    return model.linears.make(weight, checkpoint.take_rows([f"{name}.bias" for name in names], [(size,)] * len(names)))


def _take_vocabulary(checkpoint: Checkpoint, name: str, model: CausalLM) -> LMHead | None:
    """Take a head's own matrix, if it has one."""
    if not checkpoint.has(name):
        return None
    size, shape = model.config.vocab_size, checkpoint.shape(name)
    if shape[0] != size:
        raise checkpoint.error(name, f"has shape {list(shape)}, but the model has {size} tokens; {_REMEDY}")
    weight = checkpoint.take(name, size, model.config.hidden_size)
    return LMHead(model.linears.make(weight), weight.dtype)


def _check_size(checkpoint: Checkpoint, block: str, model: CausalLM) -> None:
    name, size = f"{block}.weight", model.config.hidden_size
    if checkpoint.has(name) and checkpoint.shape(name) != (size, size):
        shape = list(checkpoint.shape(name))
        raise checkpoint.error(
            name, f"has shape {shape}, but the model's hidden vectors have {size} numbers; {_REMEDY}"
        )
