"""The shipped model: its files, its agreement with transformers, and what a user would see of it."""

import ast
import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.demo_model.architecture import Llama
from ops.demo_model.corpus import held_out_documents
from ops.demo_model.evaluate import SLICE_WINDOWS, complete, evaluate, greedy_tokens
from ops.demo_model.export import MODEL_FOLDER, load_model
from ops.demo_model.tokenizer import END_OF_TEXT_ID

READ_FILE = "import os\n\ndef read_file(path):\n    with open("


@pytest.fixture(scope="module")
def shipped() -> tuple[Llama, Tokenizer]:
    return load_model()


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((MODEL_FOLDER / "training.json").read_text())
    return record


def test_weights_are_float16_and_at_most_24_megabytes() -> None:
    path = MODEL_FOLDER / "model.safetensors"

    with safe_open(path, framework="pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118

    assert dtypes == {torch.float16}
    assert path.stat().st_size <= 24_000_000


def test_all_weights_are_finite(shipped: tuple[Llama, Tokenizer]) -> None:
    assert all(torch.isfinite(parameter).all() for parameter in shipped[0].parameters())


def test_transformers_computes_the_same_logits_and_the_same_greedy_tokens(shipped: tuple[Llama, Tokenizer]) -> None:
    oracle: Any = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    oracle_tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    ids = shipped[1].encode(READ_FILE).ids
    prompt = torch.tensor([ids])

    with torch.inference_mode():
        torch.testing.assert_close(shipped[0](prompt), oracle(prompt).logits, atol=1e-3, rtol=1e-3)
        generated = oracle.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=32,
            do_sample=False,
            temperature=None,
            top_p=None,
        )

    assert oracle_tokenizer(READ_FILE)["input_ids"] == ids
    assert generated[0, len(ids) :].tolist() == greedy_tokens(shipped[0], ids, 32)


def test_transformers_renders_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Add."}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|endoftext|><|user|>Add.<|assistant|>"
    assert tokenizer.eos_token_id == END_OF_TEXT_ID


def test_open_call_is_completed_by_a_with_statement_and_an_indented_body(shipped: tuple[Llama, Tokenizer]) -> None:
    first_line, _, second_line = complete(*shipped, READ_FILE, max_tokens=16).partition("\n")

    assert first_line.endswith(") as f:")
    assert second_line.startswith("        ")


def test_chat_request_is_answered_by_one_valid_function_that_ends(shipped: tuple[Llama, Tokenizer]) -> None:
    model, tokenizer = shipped
    prompt = "<|endoftext|><|user|>Write a function: Return the sum of two numbers.<|assistant|>"

    tokens = greedy_tokens(model, tokenizer.encode(prompt).ids, max_tokens=80)

    [function] = ast.parse(tokenizer.decode(tokens)).body
    assert isinstance(function, ast.FunctionDef)
    assert "sum of two numbers" in (ast.get_docstring(function) or "")
    assert tokens[-1] == END_OF_TEXT_ID


@pytest.mark.slow
def test_held_out_loss_measured_again_is_the_loss_reported(
    shipped: tuple[Llama, Tokenizer], training: dict[str, Any]
) -> None:
    measured = evaluate(*shipped, held_out_documents(), SLICE_WINDOWS)

    assert measured.loss_per_token == pytest.approx(training["held_out_slice"]["loss_per_token"], abs=0.1)


def test_card_states_the_figures_of_the_training_record(training: dict[str, Any]) -> None:
    card = (MODEL_FOLDER / "README.md").read_text()

    assert training["is_final"] is True
    assert str(training["held_out"]["loss_per_token"]) in card
    assert str(training["held_out"]["bits_per_byte"]) in card
