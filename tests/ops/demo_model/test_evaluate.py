"""The arithmetic of a loss: tokens, bytes and windows."""

import math

import pytest
import torch
from tokenizers import Tokenizer

from ops.demo_model.architecture import Llama, LlamaShape
from ops.demo_model.evaluate import WINDOW, Evaluation, describe, evaluate
from ops.demo_model.export import MODEL_FOLDER

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
SHAPE = LlamaShape(hidden_size=64, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture
def uniform_model() -> Llama:
    """A model without an opinion: every token is equally likely."""
    model = Llama(SHAPE)
    torch.nn.init.zeros_(model.embed_tokens.weight)
    return model


def test_loss_of_a_uniform_model_is_the_log_of_the_vocabulary(uniform_model: Llama) -> None:
    evaluation = evaluate(uniform_model, TOKENIZER, ["def f(x):\n    return x\n"])

    assert evaluation.loss_per_token == pytest.approx(math.log(SHAPE.vocab_size), rel=1e-5)
    assert evaluation.perplexity_per_token == pytest.approx(SHAPE.vocab_size, rel=1e-4)


def test_bytes_and_tokens_of_all_windows_are_those_of_the_texts(uniform_model: Llama) -> None:
    texts = ["naïve → 日本\n" * 200, "x = 1\n"]

    evaluation = evaluate(uniform_model, TOKENIZER, texts)

    assert evaluation.num_bytes == sum(len(text.encode()) for text in texts)
    assert evaluation.num_tokens == sum(len(TOKENIZER.encode(text).ids) + 1 for text in texts) > WINDOW


def test_limit_stops_after_so_many_windows(uniform_model: Llama) -> None:
    assert evaluate(uniform_model, TOKENIZER, ["word " * 4000], max_windows=2).num_tokens == 2 * WINDOW


def test_figures_agree_with_each_other() -> None:
    figures = describe(Evaluation(nats=math.log(2) * 30, num_tokens=10, num_bytes=30))

    assert figures["bits_per_byte"] == 1.0
    assert figures["perplexity_per_byte"] == 2.0
    assert figures["perplexity_per_token"] == 8.0
