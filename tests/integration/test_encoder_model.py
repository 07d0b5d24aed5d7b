"""A BERT with a word tokenizer behind the whole system: vectors by CLS pooling, and a cross-encoder's ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.integration.system import running_system

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "moon", "is", "far", "a", "sum", "of", "two", "numbers"]
TEXTS = ["the moon is far", "a sum of two numbers", "moon"]


def save_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def saved(directory: Path, head: str, **options: Any) -> Any:
    """Save a random BERT and its tokenizer; return both as `transformers` has them."""
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **options)
    model = getattr(transformers, f"Bert{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1) * 0.5)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def test_vectors_of_the_first_token(tmp_path: Path) -> None:
    (tmp_path / "model" / "1_Pooling").mkdir(parents=True)
    model, tokenizer = saved(tmp_path / "model", "Model")
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    entries = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in names.items()]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "model" / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with running_system(tmp_path, "--model", str(tmp_path / "model")) as system:
        answer = system.client().embeddings.create(model=system.model, input=TEXTS)
        long = "the moon is far a sum of two numbers"
        cut, short = (
            system.post("/v1/embeddings", {"model": system.model, "input": long, **more})
            for more in ({"truncate_prompt_tokens": -1}, {})
        )
        refused = system.post("/v1/completions", {"model": system.model, "prompt": "moon"})
    assert (short.status_code, short.json()["error"]["code"]) == (400, "context_length_exceeded")
    vectors = [entry.embedding for entry in answer.data] + [cut.json()["data"][0]["embedding"]]
    for text, vector in zip([*TEXTS, long], vectors, strict=True):
        with torch.no_grad():
            tokens = tokenizer(text, truncation=True, max_length=8, return_tensors="pt")
            hidden = model(**tokens).last_hidden_state[0, 0]
        np.testing.assert_allclose(vector, (hidden / hidden.norm()).numpy(), atol=1e-4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")


def test_ranking_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model, tokenizer = saved(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    with running_system(tmp_path, "--model", str(tmp_path / "model")) as system:
        body = {"model": system.model, "query": "two numbers", "documents": TEXTS}
        answer = system.post("/rerank", body)
        cut = system.post("/rerank", body | {"truncate_prompt_tokens": 6})
    for whole, limit in ((answer, 64), (cut, 6)):
        options = {"truncation": True, "max_length": limit, "return_token_type_ids": True, "return_tensors": "pt"}
        with torch.no_grad():
            pairs = [tokenizer("two numbers", text, **options) for text in TEXTS]
            expected = [float(model(**pair).logits[0, 0].sigmoid()) for pair in pairs]
        assert pairs[0]["token_type_ids"].sum() > 0
        found = {result["index"]: result["relevance_score"] for result in whole.json()["results"]}
        assert [found[i] for i in range(len(TEXTS))] == pytest.approx(expected, abs=1e-4)
    assert list(found) == sorted(range(len(TEXTS)), key=lambda i: -expected[i])
