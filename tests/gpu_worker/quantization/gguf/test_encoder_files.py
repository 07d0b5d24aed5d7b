"""Encoders of GGUF files: their vectors against `transformers`, their tokenizers, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.models.loader import load_model
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.text.gguf_tokenizer import tokenizer_json
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import EmbeddingForm, Unserved, read_model_tasks
from gpu_worker.text.tokenizer import ModelTokenizer
from tests.gpu_worker.execution.engine_run import make_runner, run
from tests.gpu_worker.execution.pooled_sequences import assert_vectors, sequence_of
from tests.gpu_worker.execution.test_encoders import SEPARATOR, prompt_of, saved
from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.quantization.gguf.test_defects import Change, Parts, field, without
from tests.gpu_worker.quantization.gguf.vocabularies import CORPUS, TEXTS
from tests.gpu_worker.quantization.gguf.written_file import written

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_encoder(path: Path, model: Any, tokens: Sequence[str], separator: int, pooling: int | None = None) -> None:
    """Write BERT's layout of a model of `transformers`."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, model.config.num_hidden_layers)
    with written(path, "bert") as writer:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        if pooling is not None:
            writer.add_pooling_type(gguf.PoolingType(pooling))
        add_pieces(writer, tokens)
        writer.add_sep_token_id(separator)
        for name, tensor in model.named_parameters():
            if not name.startswith("pooler."):
                stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
                writer.add_tensor(stored, np.ascontiguousarray(tensor.detach().numpy()))


def add_pieces(writer: Any, tokens: Sequence[str]) -> None:
    """Add BERT's vocabulary: beginnings of words are marked, and what goes on is not."""
    special = [token.startswith("[") and token.endswith("]") for token in tokens]
    pieces = [
        token if is_special else token[2:] if token.startswith("##") else f"▁{token}"
        for token, is_special in zip(tokens, special, strict=True)
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if is_special else 1 for is_special in special])
    for add, token in ((writer.add_unk_token_id, "[UNK]"), (writer.add_bos_token_id, "[CLS]")):
        if token in tokens:
            add(list(tokens).index(token))


def trained_word_pieces(corpus: Sequence[str]) -> Tokenizer:
    """Train a tokenizer as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    return tokenizer


def trained_unigrams(corpus: Sequence[str]) -> Tokenizer:
    """Train a tokenizer as XLM-RoBERTa's, without its table of characters."""
    tokenizer = Tokenizer(models.Unigram())
    spaces = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    return tokenizer


_TOKENS = [*("[PAD]", "[UNK]", "[CLS]", "x3", "x4", "[SEP]"), *(f"x{index}" for index in range(6, SIZES["vocab_size"]))]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("encoder")
    model = saved(directory, "bert")
    write_encoder(directory / "model.gguf", model, _TOKENS, SEPARATOR, pooling=2)
    return directory / "model.gguf", model


def test_vectors_equal_transformers(encoder: tuple[Path, Any]) -> None:
    path, model = encoder
    plan = PoolingPlan("mean", is_whole=True)
    sequences = [sequence_of(str(length), prompt_of(length), plan) for length in (1, 17, 60)]
    run(make_runner(path, dtype="float32"), sequences, token_budget=64)
    assert_vectors(model, sequences)


def test_second_segment_begins_behind_the_separator(encoder: tuple[Path, Any]) -> None:
    traits = read_gguf_config(encoder[0]).encoder
    assert traits is not None
    assert (traits.separator, traits.num_segments, traits.first_position) == (SEPARATOR, 2, 0)


def test_vectors_are_all_that_an_encoder_gives(encoder: tuple[Path, Any]) -> None:
    directory = read_model_directory(encoder[0])
    tasks = read_model_tasks(directory, ModelTokenizer(directory))
    assert not tasks.generates
    assert tasks.embedding == EmbeddingForm("first", True, SIZES["hidden_size"], is_whole=True)
    assert tasks.score == Unserved("its file has no head that scores")


def test_a_head_of_one_class_scores_instead(encoder: tuple[Path, Any]) -> None:
    directory = read_model_directory(encoder[0])
    tokenizer = ModelTokenizer(directory)
    assert read_model_tasks(replace(directory, num_classes=1), tokenizer).names == ("score",)
    assert read_model_tasks(replace(directory, num_classes=3), tokenizer).names == ()


DEFECTS: dict[str, tuple[Change, str]] = {
    "a head without its first layer": (
        lambda parts: parts.add_dense("cls.output.weight", 1, 48),
        r"tensors cls\.output\.weight.* are not of a whole head",
    ),
    "no positions": (without("position_embd.weight"), "'position_embd.weight' is missing; encoders are served with"),
    "a separator that is not a token": (field("tokenizer.ggml.seperator_token_id", 97), "whole number from 0 to 96"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(encoder: tuple[Path, Any], tmp_path: Path, defect: str) -> None:
    change, problem = DEFECTS[defect]
    parts = Parts(encoder[0])
    change(parts)
    parts.write(tmp_path / "defect.gguf")
    with pytest.raises(GGUFError, match=problem):
        read_gguf_config(tmp_path / "defect.gguf")


def test_a_tensor_that_encoders_do_not_have_is_refused(encoder: tuple[Path, Any], tmp_path: Path) -> None:
    parts = Parts(encoder[0])
    parts.add_dense("blk.0.ffn_gate.weight", 80, 48)
    parts.write(tmp_path / "more.gguf")
    with pytest.raises(GGUFError, match=r"'blk\.0\.ffn_gate\.weight' is in no model that can be served"):
        load_model(tmp_path / "more.gguf", torch.float32, torch.device("cpu"))


def of_file(path: Path, write: Any) -> Tokenizer:
    """Return the tokenizer of a file that has nothing else."""
    with written(path, "bert") as writer:
        write(writer)
    with GGUFFile(path) as file:
        return Tokenizer.from_str(tokenizer_json(file.metadata).decode())


def assert_alike(ours: Tokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        for pair in (None, "and the fox"):
            got, expected = ours.encode(text, pair), original.encode(text, pair)
            assert (got.ids, got.type_ids) == (expected.ids, expected.type_ids), text
        assert ours.decode(got.ids) == original.decode(expected.ids)


def test_pieces_of_words_equal_the_original_tokenizer(tmp_path: Path) -> None:
    original = trained_word_pieces(CORPUS)
    tokens = [original.id_to_token(index) for index in range(original.get_vocab_size())]

    def write(writer: Any) -> None:
        add_pieces(writer, tokens)
        writer.add_sep_token_id(tokens.index("[SEP]"))

    assert_alike(of_file(tmp_path / "pieces.gguf", write), original)


def test_pieces_with_chances_equal_the_original_tokenizer(tmp_path: Path) -> None:
    original = trained_unigrams(CORPUS)
    pieces = json.loads(original.to_str())["model"]["vocab"]

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([piece for piece, _ in pieces])
        writer.add_token_scores([score for _, score in pieces])
        writer.add_token_types([3, 3, 3, 2, *[1] * (len(pieces) - 4)])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)

    assert_alike(of_file(tmp_path / "chances.gguf", write), original)


def test_texts_without_tokens_around_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"'tokenizer\.ggml\.seperator_token_id' is missing, but every text"):
        of_file(tmp_path / "pieces.gguf", lambda writer: add_pieces(writer, _TOKENS))
