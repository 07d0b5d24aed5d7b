"""From a step's hidden vectors to what it gives: tokens that are drawn, log probabilities of prompts, pooled vectors.

Owns the last token of each row of the batch, which a step needs that is launched before the host knows it.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.execution.batch.assembled_step import AssembledStep, SampledRows
from gpu_worker.execution.batch.graph_shapes import MAX_VERIFIED_ROWS
from gpu_worker.execution.batch.graphs import ComputedRows
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import StagedArray, Upload
from gpu_worker.execution.pooling import PooledChunk, pool, pooled_chunks
from gpu_worker.execution.sampling.grammar_mask import StagedGrammarMask
from gpu_worker.execution.sampling.prompt_logprobs import PromptChunk, prompt_chunks, score_chunk
from gpu_worker.execution.sampling.sampler import DrawnTokens, Sampler, StagedSampling
from gpu_worker.execution.step import StepOutputs
from gpu_worker.layers.ranks import Ranks
from gpu_worker.models.decoder import CausalLM


class _Tile(Struct, frozen=True, gc=False):
    """Rows that are sampled at once, on their way to the device; `tokens` is None where they are all there are."""

    sampling: StagedSampling
    tokens: StagedArray | None


class StagedHead(Struct, frozen=True, gc=False):
    """What is computed from a step's hidden vectors, on its way to the device."""

    tiles: list[_Tile]
    chunks: list[tuple[PromptChunk, StagedArray]]
    pooled: list[PooledChunk]


class StepHead:
    """Computes on the model's device.

    Attributes:
        last_tokens: `[num_rows]` int64, what was drawn last for each row where the device keeps it.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, rows: BatchRows, *, keeps_last_tokens: bool) -> None:
        self._model = model
        self._sampler = sampler
        # With drafts there are more rows than sequences; what their logits take must not grow with it.
        self._max_tile_rows = max(rows.spare, MAX_VERIFIED_ROWS)
        self._keeps_last_tokens = keeps_last_tokens
        self.last_tokens = torch.zeros(rows.num_rows, dtype=torch.int64, device=model.device)

    def stage(self, step: AssembledStep, upload: Upload) -> StagedHead:
        """Prepare what follows the hidden vectors of any step."""
        tiles = [self._stage_tile(tile, step, upload) for tile in step.sampled_rows().tiles(self._max_tile_rows)]
        if step.is_decode:
            return StagedHead(tiles, [], [])
        chunks = prompt_chunks(step.shares, step.layout.query_starts)
        targets = [upload.add(np.array(chunk.targets, dtype=np.int64)) for chunk in chunks]
        pooled = pooled_chunks(step.shares, step.layout.query_starts)
        return StagedHead(tiles, list(zip(chunks, targets, strict=True)), pooled)

    def tell_last(self, staged: StagedHead, ranks: Ranks) -> None:
        """Send the last stage what only rank 0 of the first knows: the masks of grammars."""
        if ranks.stage > 0 or ranks.rank > 0:
            return
        masks = [feature for tile in staged.tiles for feature in tile.sampling.features]
        for mask in masks:
            if isinstance(mask, StagedGrammarMask):
                ranks.tell_last(mask.fill())

    def outputs(self, step: AssembledStep, staged: StagedHead, computed: ComputedRows) -> StepOutputs:
        """Compute what the step gives from what was launched; the upload was sent. Logits are overwritten."""
        hidden, vocabulary = computed.hidden, self._sampler.vocabulary
        scores = [
            (chunk, score_chunk(self._model, vocabulary, hidden, chunk, targets.tensor, step.adapters))
            for chunk, targets in staged.chunks
        ]
        drawn = []
        for tile in staged.tiles:
            logits = computed.logits
            if logits is None:
                rows = hidden if tile.tokens is None else hidden.index_select(0, tile.tokens.tensor)
                adapters = step.adapters
                if adapters is not None and tile.tokens is not None:
                    adapters = adapters.of(tile.tokens.array)
                logits = self._model.logits(rows, adapters)
            drawn.append(self._draw(step, logits, tile.sampling))
        pooled = pool(self._model, vocabulary, hidden, staged.pooled, step.adapters)
        return StepOutputs(step.samples, drawn, scores, step.sampling_drafts, pooled)

    def _stage_tile(self, sampled: SampledRows, step: AssembledStep, upload: Upload) -> _Tile:
        is_whole = len(sampled.rows) == len(step.layout.token_ids)
        return _Tile(self._sampler.stage(sampled, upload), None if is_whole else upload.add(sampled.tokens))

    def _draw(self, step: AssembledStep, logits: torch.Tensor, staged: StagedSampling) -> DrawnTokens:
        """Sample; where the next step may be launched before the host knows the tokens, keep them."""
        drawn = self._sampler.sample(logits, staged)
        if self._keeps_last_tokens and step.drafts is None:
            self.last_tokens.index_copy_(0, staged.slots.tensor, drawn.token_ids)
        return drawn
