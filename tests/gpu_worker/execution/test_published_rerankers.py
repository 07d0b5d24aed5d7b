"""Rerankers in the layouts in which they are published: scores as `transformers` computes them by their model cards."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.consumer.pooled_answers import PooledAnswers
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import read_model_tasks
from gpu_worker.text.score_prompt import ScoredText, score_prompt
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.pooling import Pooling
from tests.gpu_worker.execution.engine_run import BLOCK, make_runner, run
from tests.gpu_worker.execution.pooled_sequences import sequence_of
from tests.gpu_worker.execution.reranker_layouts import (
    DOCUMENTS,
    INSTRUCTION,
    PREFIX,
    QUERY,
    SUFFIX,
    save_bge,
    save_minilm,
    save_qwen3,
    save_sentence_files,
)

SIGMOID, IDENTITY = "activation.Sigmoid", "linear.Identity"
OLD = {"sbert_ce_default_activation_function": f"torch.nn.modules.{IDENTITY}"}
NEW = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{IDENTITY}", "version": "4.1.0.dev0"}}
ONE_CLASS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

Pairs = list[tuple[str, str]]
PAIRS: Pairs = [(QUERY, document) for document in DOCUMENTS]


def scores(directory: Path, pairs: Pairs, instruction: str | None = None) -> list[float]:
    """Score pairs as a worker does, from the files to the number in the answer."""
    model = read_model_directory(directory)
    tokenizer = ModelTokenizer(model)
    tasks = read_model_tasks(model, tokenizer)
    form = tasks.score_form
    assert form is not None, tasks.unserved
    prompts = [score_prompt(tokenizer, form, ScoredText(*pair, instruction)) for pair in pairs]
    sequences = [sequence_of(str(number), prompt, form.plan) for number, prompt in enumerate(prompts)]
    runner = make_runner(directory, num_blocks=model.max_model_len // BLOCK)
    # In chunks, where the model allows it.
    run(runner, sequences, token_budget=512 if form.plan.is_whole else 200)
    answers = PooledAnswers(tasks)
    return [struct.unpack("<f", answers.vector(Pooling(task="score"), each))[0] for each in sequences]


def logits(directory: Path, texts: list[Any], auto: str) -> Any:
    """Return the logits of `transformers` for the last place of each text or pair, `[num_texts, num_logits]`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = getattr(transformers, auto).from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            given = tokenizer(*text if isinstance(text, tuple) else (text,), return_tensors="pt")
            found = model(**given).logits[0]
            rows.append(found if found.dim() == 1 else found[-1])
    return torch.stack(rows)


def card_prompt(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    return f"{PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"


def check(found: list[float], expected: Any) -> None:
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    # The oracle tells the documents apart, too.
    assert expected.max() - expected.min() > 1e-3


@pytest.mark.parametrize("activation", [OLD, NEW, {}], ids=["before-4.0", "since-4.0", "none"])
def test_minilm_cross_encoder(tmp_path: Path, activation: dict[str, Any]) -> None:
    save_minilm(tmp_path, **activation)
    logit = logits(tmp_path, PAIRS, "AutoModelForSequenceClassification")[:, 0]
    check(scores(tmp_path, PAIRS), logit if activation else logit.sigmoid())


def test_bge_reranker(tmp_path: Path) -> None:
    save_bge(tmp_path)
    check(scores(tmp_path, PAIRS), logits(tmp_path, PAIRS, "AutoModelForSequenceClassification")[:, 0].sigmoid())


@pytest.mark.parametrize("instruction", [None, "Find planets"])
def test_qwen3_reranker_with_the_template_of_its_model_card(tmp_path: Path, instruction: str | None) -> None:
    tokenizer = save_qwen3(tmp_path, "Qwen3ForCausalLM")
    prompts = [card_prompt(query, document, instruction or INSTRUCTION) for query, document in PAIRS]
    found = logits(tmp_path, prompts, "AutoModelForCausalLM")
    no, yes = (found[:, tokenizer.token_to_id(word)] for word in ("no", "yes"))
    check(scores(tmp_path, PAIRS, instruction), torch.stack([no, yes], 1).softmax(1)[:, 1])


def test_qwen3_reranker_with_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    tokenizer = save_qwen3(tmp_path, "Qwen3ForCausalLM")
    no, yes = (tokenizer.token_to_id(word) for word in ("no", "yes"))
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    save_sentence_files(tmp_path, "Transformer", "LogitScore", activation=IDENTITY, score=score)
    found = logits(tmp_path, [card_prompt(*pair) for pair in PAIRS], "AutoModelForCausalLM")
    check(scores(tmp_path, PAIRS), found[:, yes] - found[:, no])
    found = logits(tmp_path, [card_prompt(*pair, "Find planets") for pair in PAIRS], "AutoModelForCausalLM")
    check(scores(tmp_path, PAIRS, "Find planets"), found[:, yes] - found[:, no])


def test_qwen3_reranker_as_a_classifier_gets_the_texts_that_its_client_formats(tmp_path: Path) -> None:
    save_qwen3(tmp_path, "Qwen3ForSequenceClassification", **ONE_CLASS)
    pairs: Pairs = [
        (f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {query}\n", f"<Document>: {document}{SUFFIX}")
        for query, document in PAIRS
    ]
    logit = logits(tmp_path, [first + second for first, second in pairs], "AutoModelForSequenceClassification")
    check(scores(tmp_path, pairs), logit[:, 0].sigmoid())


def test_qwen3_reranker_as_a_classifier_with_its_own_template(tmp_path: Path) -> None:
    save_qwen3(tmp_path, "Qwen3ForSequenceClassification", **ONE_CLASS)
    save_sentence_files(tmp_path, "Transformer", activation=SIGMOID)
    logit = logits(tmp_path, [card_prompt(*pair) for pair in PAIRS], "AutoModelForSequenceClassification")
    check(scores(tmp_path, PAIRS), logit[:, 0].sigmoid())
