"""The decoder that all families share: takes the weights that the configuration calls for, in the device's form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import torch

from gpu_worker.core.step_interrupt import StepInterrupt
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import LayerState
from gpu_worker.layers.encoder import Encoder, EncoderEmbeddings, EncoderLayer, EncoderLayerWeights
from gpu_worker.layers.fused_decoder import FusedDecoder, can_fuse
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer_inputs import take_layer_inputs
from gpu_worker.layers.layer_packing import can_pack
from gpu_worker.layers.layer_source import LayerSource, Projections, QuantizedLayers, WeightSource
from gpu_worker.layers.layered_decoder import DecoderForm, LayeredDecoder
from gpu_worker.layers.linear import LayerParts, Partition, Projection
from gpu_worker.layers.mixture import ExpertLoads
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.layers.norms import LayerNorm, make_norm
from gpu_worker.layers.ranks.blocks import ReceivedStream
from gpu_worker.layers.ranks.division import Division, divided_shape, divided_weights
from gpu_worker.layers.ranks.experts import PlacedExperts
from gpu_worker.layers.ranks.rank import ALONE, Ranks, is_last, layers_of_stage, sum_in_kernels
from gpu_worker.layers.ranks.vocabulary import vocabulary_of
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.stored_matrix import PartSource, has_input_order
from gpu_worker.layers.vocabulary import Embedding, LMHead, NormedEmbedding
from gpu_worker.models.adapted_matrices import declare_elsewhere, embedding_adapters, head_adapters
from gpu_worker.models.class_heads import take_class_head
from gpu_worker.models.config import EncoderTraits, ModelConfig
from kernels.build import can_build
from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.decoder_stack import StackShape
from kernels.linear import LinearFactory
from kernels.linear.forms import DenseWeight, WeightForm
from kernels.low_rank import AdapterRows, AdapterTable
from kernels.state_rows import StateRows

# The names of an encoder's tensors are those that BERT gave them.
_ENCODER_WORDS = "embeddings.word_embeddings.weight"
# Of other uses of the checkpoint, or numbers that are computed here.
_ENCODER_UNUSED = r"pooler\..*|cls\..*|lm_head\..*|embeddings\.(position_ids|token_type_ids)"


class CausalLM:
    """A whole model on one device. It keeps weights and scratch memory only; one thread calls it.

    Attributes:
        embedding: `[vocab_size, hidden_size]`; of 16 bits where the checkpoint has it so, even if `dtype` is float32.
        linears: Makes its linear layers, and those of proposers of drafts.
        adapters: The adapters beside its matrices; None where there can be none.
        expanding: Attention by latent vectors, which says which steps make keys and values; None where none does.
        vocabulary: Draws and scores tokens by what `logits()` returns.
        has_head: It has the last layers, and the head: else nothing but `forward()` may be called.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        linears: LinearFactory,
        quantized: QuantizedLayers | None = None,
        adapters: AdapterTargets | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Take every weight that the configuration calls for; the rest stays in the checkpoint.

        Without `quantized`, linear layers are dense. `ranks` are those among which the model is divided.
        """
        self.adapters = None if config.encoder is not None else adapters
        self.config = config
        self.dtype, self.device = dtype, device
        self.linears = linears
        self._ranks, self.has_head = ranks, is_last(ranks)
        self.vocabulary = vocabulary_of(ranks, config.vocab_size)
        division = None if ranks.size == 1 else Division.of(ranks)
        latent = next((layer.mixer for layer in config.layers if isinstance(layer.mixer, LatentShape)), None)
        if latent is not None and division is not None and not division.has_whole_mixers:
            latent = divided_shape(latent, division)
        self.expanding = latent if latent is not None and latent.can_expand(device, ranks.tokens) else None
        words = "model.embed_tokens.weight" if config.encoder is None else _ENCODER_WORDS
        if ranks.stage == 0 or (self.has_head and config.tie_word_embeddings):
            self.embedding = vocabulary = _take_words(config, checkpoint, words, division)
        else:
            checkpoint.discard(re.escape(words))
            self.embedding = vocabulary = checkpoint.ones(config.hidden_size).new_empty(0, config.hidden_size)
        source = config.layer_source(checkpoint, quantized, is_divided=division is not None)
        self._rotations = rotations = Rotations(config.ropes, config.max_model_len, vocabulary.device, is_lazy=True)
        here = layers_of_stage(config.num_layers, ranks.stage, ranks.num_stages)
        self._decoder = _decoder(config, source, vocabulary, dtype, linears, rotations, ranks, here, self.adapters)
        declare_elsewhere(config, source, dtype, here, self.adapters)
        if ranks.has_whole_experts:
            # Those of other ranks.
            patterns = {layer.mixture.names.pattern for layer in config.layers if layer.mixture is not None}
            checkpoint.discard(rf"model\.layers\.\d+\.(?:{'|'.join(sorted(patterns))})")
        self._head_bias: torch.Tensor | None = None
        self._head: LMHead | None = None
        self._classes: Callable[[torch.Tensor], torch.Tensor] | None = None
        if self.has_head:
            self._take_head(source, division)
            self._classes = take_class_head(config, checkpoint, linears)
        else:
            # The head is the last stage's.
            checkpoint.discard(r"lm_head\..*|model\.norm\..*")
        if config.encoder is not None:
            checkpoint.discard(_ENCODER_UNUSED)

    def _take_head(self, source: LayerSource, division: Division | None) -> None:
        config, checkpoint, has_bias = self.config, source.checkpoint, self.config.block.has_head_bias
        tokens = None if division is None else division.tokens(config.vocab_size)
        if config.tie_word_embeddings:
            checkpoint.discard(r"lm_head\.weight")
            bias = checkpoint.take("lm_head.bias", config.vocab_size) if has_bias else None
            if tokens is not None and bias is not None:
                bias = bias[tokens.to(bias.device)]
            head = Projection(DenseWeight(self.embedding), bias)
        else:
            head = source.projections.take(["lm_head"], [config.vocab_size], config.hidden_size, has_bias=has_bias)
            head = head if division is None else division.vocabulary(head)
        self._head_bias = head.bias
        self._head = self._lm_head(head.weight, self.dtype, head_adapters(config, self.adapters, tokens))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Compute a step: write the tokens' keys and values into the cache, return their hidden vectors.

        Call it, and `logits()`, under `torch.inference_mode()`.

        Shapes:
            token_ids, positions: `[num_tokens]` int64, the sequences end to end; positions below `max_model_len`
            result: `[num_tokens, hidden_size]`, normalised for `logits()`; behind it, as further columns, the residual
                streams before the layers that are tapped
        """
        self._rotations.cover(positions)
        if context.media is not None and context.media.positions is not None:
            self._rotations.cover(context.media.positions.flatten())
        hidden = self._decoder(token_ids, positions, context)
        if not self.has_head:
            self._ranks.send(hidden)
        return hidden

    def interrupt_by(self, interrupt: StepInterrupt) -> bool:
        """From now on compute no further layer of a step with prompts that is asked to end, and return anything.

        False where that cannot be: where others compute the step too, or whole prompts at once.
        """
        if self._ranks is not ALONE or not isinstance(self._decoder, LayeredDecoder | FusedDecoder):
            return False
        self._decoder.interrupt_by(interrupt)
        return True

    def rotary_table(self, layer: int) -> torch.Tensor:
        """Return the cosines, then the sines, by which an attention layer turns keys; `[max_model_len, head_dim]`."""
        shape = self.config.attention_shape(layer)
        return self._rotations.of(shape.rotary, shape.head_dim, shape.rotary_dim)

    def replay_drafts(self, places: torch.Tensor, states: Sequence[LayerState | None], rows: StateRows) -> None:
        """Advance the states of recurrent layers by the accepted draft tokens of the last step.

        Args:
            places: `[num_tokens]` int64, indices of the tokens among the drafts that layers kept.
            states: Of all layers.
            rows: The sequences, whose accepted drafts are laid end to end.
        """
        assert isinstance(self._decoder, LayeredDecoder), "a model with states is computed layer by layer"
        self._decoder.replay_drafts(places, states, rows)

    def expert_loads(self) -> ExpertLoads | None:
        """Return what reads how tokens fall on experts; None where there are no mixtures."""
        return self._decoder.expert_loads() if isinstance(self._decoder, LayeredDecoder | FusedDecoder) else None

    @property
    def placed_experts(self) -> Sequence[PlacedExperts]:
        """The experts, by layers, that move between ranks; none where they stay where they are."""
        return self._decoder.placed_experts if isinstance(self._decoder, LayeredDecoder) else ()

    def head_in(self, dtype: torch.dtype) -> LMHead:
        """Return the head for hidden vectors of another type, computed in that where the matrix is at hand."""
        if dtype is self.dtype or not self.config.tie_word_embeddings:
            assert self._head is not None, "the head is the last stage's"
            return self._head
        return self._lm_head(DenseWeight(self.embedding.to(dtype)), dtype)

    def _lm_head(self, weight: WeightForm, dtype: torch.dtype, adapters: AdapterTable | None = None) -> LMHead:
        block = self.config.block
        bias = None if self._head_bias is None else self._head_bias.to(dtype)
        projection = self.linears.make(weight, bias)
        vocab_size = self.config.vocab_size
        return LMHead(projection, dtype, block.logit_scale, block.logit_soft_cap, self._ranks, vocab_size, adapters)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score classes: `[num_rows, num_classes]` float32 for `hidden: [num_rows, hidden_size]` float32."""
        assert self._classes is not None, "the model has no classes"
        return self._classes(hidden)

    def logits(self, hidden: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Score the vocabulary, by the adapters of rows where any has one.

        Shapes:
            hidden: `[num_rows, hidden_size]`, rows of what `forward()` returned
            result: `[num_rows, vocab_size]` float32
        """
        assert self._head is not None, "the head is the last stage's"
        return self._head(hidden[:, : self.config.hidden_size] if self.config.tapped_layers else hidden, adapters)


def _decoder(
    config: ModelConfig,
    source: LayerSource,
    embedding: torch.Tensor,
    dtype: torch.dtype,
    linears: LinearFactory,
    rotations: Rotations,
    ranks: Ranks,
    here: range,
    adapters: AdapterTargets | None,
) -> DecoderForm:
    """Choose the form of the layers: fused into one call if possible, else operation by operation."""
    if config.encoder is not None:
        return _take_encoder(config, config.encoder, source.checkpoint, embedding, linears)
    # One after another, so that only one layer has both its plain and its packed weights.
    layers = (config.take_layer(source, index) for index in here)
    if ranks.size > 1:
        layers = (divided_weights(weights, Division.of(ranks)) for weights in layers)
    if others := "|".join(str(index) for index in range(config.num_layers) if index not in here):
        source.checkpoint.discard(rf"model\.layers\.({others})\..*")
    final_norm = source.norm("model.norm") if config.block.has_final_norm and is_last(ranks) else None
    shape, library = stack_shape(config, ranks.size), _fusing_library(config, dtype, embedding.device, ranks.size)
    if library is not None and sum_in_kernels(ranks) and not (ranks.size > 1 and _gathers_inputs(config, source)):
        assert final_norm is not None, "fused kernels normalise the stream at the end"
        attention = config.attention_shape(0)
        cos_sin = rotations.of(attention.rotary, attention.head_dim, attention.rotary_dim)
        words = Embedding(embedding, dtype, ranks=ranks)
        return FusedDecoder(
            library, shape, words, layers, final_norm.weight, cos_sin, config.tapped_layers, config.vocab_size, adapters
        )
    embed = _embedding(source, embedding, dtype, ranks)
    parts = LayerParts.made_by(linears, rotations, ranks, adapters)
    inputs = take_layer_inputs(source, config.num_layers, parts, dtype)
    table = take_positions(config, source.checkpoint)
    learned = None if table is None else Embedding(table, dtype)
    lookups = embedding_adapters(config, embed, adapters)
    return LayeredDecoder(embed, layers, final_norm, parts, config.tapped_layers, inputs, learned, lookups)


def _take_words(config: ModelConfig, checkpoint: WeightSource, name: str, division: Division | None) -> torch.Tensor:
    if division is None:
        return checkpoint.take(name, config.vocab_size, config.hidden_size)
    dense = Projections(checkpoint, is_divided=True)
    words = dense.take([name.removesuffix(".weight")], [config.vocab_size], config.hidden_size)
    taken = division.vocabulary(words).weight
    assert isinstance(taken, DenseWeight)
    return taken.weight


def _gathers_inputs(config: ModelConfig, source: LayerSource) -> bool:
    """Whether inputs of layers divided by input are stored in another order, so that each rank needs all of them."""
    names, size = config.block.names, config.hidden_size
    modules = (
        f"model.layers.{index}.{module}"
        for index, layer in enumerate(config.layers)
        for linear in layer.linears(names, size).values()
        if linear.partition is Partition.ROW
        for module in linear.modules
    )
    checkpoint = source.checkpoint
    return isinstance(checkpoint, PartSource) and any(has_input_order(checkpoint, module) for module in modules)


def _embedding(
    source: LayerSource, weight: torch.Tensor, dtype: torch.dtype, ranks: Ranks
) -> Embedding | NormedEmbedding | ReceivedStream:
    traits, size = source.block.embeddings, source.hidden_size
    if ranks.stage > 0:
        return ReceivedStream(ranks, size, dtype)
    words = Embedding(weight, dtype, source.embedding_scale(dtype), ranks)
    if traits is None:
        return words
    segment = None
    if traits.num_segments:
        segment = source.checkpoint.take("model.segments.weight", traits.num_segments, size)[0].to(words.dtype)
    return NormedEmbedding(words, make_norm(source.norm("model.embedding_norm")), segment)


def take_positions(config: ModelConfig, checkpoint: WeightSource) -> torch.Tensor | None:
    """Take the learned positions that tokens may have, `[num_positions, hidden_size]`; None in a model without such."""
    positions = config.block.positions
    if positions is None:
        return None
    num_rows = positions.first_row + positions.num_positions
    return checkpoint.take("model.embed_positions.weight", num_rows, config.hidden_size)[positions.first_row :]


def is_fused(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int = 1, *, compiles: bool = True
) -> bool:
    """Return True if the layers will be computed in one call, with one block table for all of them.

    Without `compiles`, kernels that a compiler could make are taken to be there.
    """
    if compiles:
        return _fusing_library(config, dtype, device, num_ranks) is not None
    return can_build() and _can_fuse(config, dtype, device, num_ranks)


def _fusing_library(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int) -> CpuLibrary | None:
    return cpu_library() if _can_fuse(config, dtype, device, num_ranks) else None


def _can_fuse(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int) -> bool:
    mixtures = [layer.mixture for layer in config.layers if layer.mixture is not None]
    is_odd = any(mixture.expert_size // num_ranks % 2 for mixture in mixtures)
    is_suited = config.encoder is None and is_fusable(config) and not is_odd
    return is_suited and can_fuse(stack_shape(config, num_ranks), dtype, device)


def is_fusable(config: ModelConfig) -> bool:
    """Return True if the fused kernels of a CPU compute such a decoder: its layers differ in nothing but windows."""
    if not config.block.is_fusable or not all(can_pack(layer) for layer in config.layers):
        return False
    shapes = map(config.attention_shape, range(config.num_layers))
    kinds = {dataclasses.replace(shape, sliding_window=None) for shape in shapes}
    sizes = {layer.feed_forward.inner_size for layer in config.layers if isinstance(layer.feed_forward, GatedShape)}
    return len(kinds) == 1 and sizes <= {config.intermediate_size}


def stack_shape(config: ModelConfig, num_ranks: int = 1) -> StackShape:
    """Return the sizes that all layers share, of one of several ranks, as the fused kernel takes them."""
    return StackShape(
        config.hidden_size,
        config.intermediate_size // num_ranks,
        config.num_heads // num_ranks,
        max(1, config.num_kv_heads // num_ranks),
        config.head_dim,
        config.rms_norm_eps,
    )


def _take_encoder(
    config: ModelConfig, traits: EncoderTraits, source: WeightSource, words: torch.Tensor, linears: LinearFactory
) -> Encoder:
    size, projections = config.hidden_size, Projections(source)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(source.take(f"{name}.weight", size), source.take(f"{name}.bias", size), config.rms_norm_eps)

    def layer(index: int) -> EncoderLayer:
        name = f"encoder.layer.{index}"
        attention = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        weights = EncoderLayerWeights(
            qkv=projections.take(attention, [size] * 3, size, has_bias=True),
            output=projections.take([f"{name}.attention.output.dense"], [size], size, has_bias=True),
            attention_norm=norm(f"{name}.attention.output.LayerNorm"),
            inner=projections.take([f"{name}.intermediate.dense"], [config.intermediate_size], size, has_bias=True),
            outer=projections.take([f"{name}.output.dense"], [size], config.intermediate_size, has_bias=True),
            norm=norm(f"{name}.output.LayerNorm"),
        )
        return EncoderLayer(weights, config.num_heads, traits.activation, linears)

    embeddings = EncoderEmbeddings(
        words,
        source.take("embeddings.position_embeddings.weight", traits.num_positions, size),
        source.take("embeddings.token_type_embeddings.weight", traits.num_segments, size),
        norm("embeddings.LayerNorm"),
        traits.first_position,
        traits.separator,
    )
    return Encoder(embeddings, (layer(index) for index in range(config.num_layers)))
