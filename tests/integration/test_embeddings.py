"""Embeddings, reranking and scores of the running system with the demo model, against `transformers` and by the SDK."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch

import ops
from tests.integration.system import System

TEXTS = ["def add(a, b):", "Reads a file.", "x = 1\n" * 120]
QUERY, DOCUMENTS = "add two numbers", ["def add(a, b):\n    return a + b", "The moon is far away.", "x"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The demo model as `transformers` has it, and its tokenizer."""
    import transformers

    path = Path(ops.__file__).parent / "demo_model" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def last_hidden(oracle: Any, token_ids: list[int]) -> Any:
    with torch.no_grad():
        return oracle[0].model(torch.tensor([token_ids])).last_hidden_state[0, -1]


def test_sdk_gets_the_normalised_last_vector(system: System, oracle: Any) -> None:
    # Without `encoding_format` the SDK asks for base64 and decodes it.
    answer = system.client().embeddings.create(model=system.model, input=TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    for text, entry in zip(TEXTS, answer.data, strict=True):
        hidden = last_hidden(oracle, oracle[1](text).input_ids)
        np.testing.assert_allclose(entry.embedding, (hidden / hidden.norm()).numpy(), atol=TOLERANCE)


def test_forms_of_vectors_and_inputs_agree(system: System, oracle: Any) -> None:
    client, model = system.client(), system.model
    (default,) = client.embeddings.create(model=model, input=TEXTS[0]).data
    (floats,) = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="float").data
    (tokens,) = client.embeddings.create(model=model, input=oracle[1](TEXTS[0]).input_ids).data
    (cut,) = client.embeddings.create(model=model, input=TEXTS[0], dimensions=10).data
    np.testing.assert_allclose(default.embedding, floats.embedding, atol=1e-7)
    np.testing.assert_allclose(default.embedding, tokens.embedding, atol=TOLERANCE)
    head = np.array(default.embedding[:10])
    np.testing.assert_allclose(cut.embedding, head / np.linalg.norm(head), atol=TOLERANCE)


def test_size_that_the_model_has_not_is_refused_with_the_limit(system: System) -> None:
    with pytest.raises(openai.BadRequestError, match="can have 1 to 256") as caught:
        system.client().embeddings.create(model=system.model, input="x", dimensions=257)
    assert caught.value.param == "dimensions"


def expected_score(oracle: Any, document: str) -> float:
    model, tokenizer = oracle
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    asked = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
    messages = [{"role": "system", "content": judge}, {"role": "user", "content": asked}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    logits = model.lm_head(last_hidden(oracle, tokenizer(text, add_special_tokens=False).input_ids))
    yes, no = (tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("yes", "no"))
    return 1 / (1 + math.exp(float((logits[no] - logits[yes]).detach())))


def test_scores_and_ranking_equal_the_two_tokens_probabilities(system: System, oracle: Any) -> None:
    expected = [expected_score(oracle, document) for document in DOCUMENTS]
    with httpx2.Client(base_url=system.url, headers=system.headers(), timeout=60) as http:
        body: dict[str, Any] = {"model": system.model, "text_1": QUERY, "text_2": DOCUMENTS}
        scores = [entry["score"] for entry in http.post("/score", json=body).json()["data"]]
        body = {"model": system.model, "query": QUERY, "documents": DOCUMENTS}
        results = http.post("/rerank", json=body).json()["results"]
        raw = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    assert [result["index"] for result in results] == sorted(range(3), key=lambda index: -expected[index])
    assert [result["relevance_score"] for result in results] == sorted(scores, reverse=True)
    logits = {entry["index"]: entry["score"] for entry in raw}
    assert [1 / (1 + math.exp(-logits[index])) for index in range(3)] == pytest.approx(expected, abs=TOLERANCE)
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[result["index"]] for result in results]
