"""The shipped model and its drafts: their files, and what a user would see of the model."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.stack.config import DEMO_MODEL

READ_FILE = "import os\n\ndef read_file(path):\n    with open("
SUM = [{"role": "user", "content": "Write a function: Return the sum of two numbers."}]


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(
        DEMO_MODEL
    )


def continued(oracle: tuple[Any, Any], text: str, max_tokens: int) -> str:
    model, tokenizer = oracle
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    continuation: str = tokenizer.decode(generated[0, ids.shape[1] :])
    return continuation


@pytest.mark.parametrize(("folder", "max_bytes"), [("model", 24e6), ("draft", 4e6), ("eagle", 4e6)])
def test_weights_are_small_and_finite_float16(folder: str, max_bytes: float) -> None:
    path: Path = DEMO_MODEL.parent / folder / "model.safetensors"

    with safe_open(path, framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118

    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert path.stat().st_size <= max_bytes


def test_open_call_is_completed_by_a_with_statement_and_an_indented_body(oracle: tuple[Any, Any]) -> None:
    first_line, _, second_line = continued(oracle, READ_FILE, max_tokens=16).partition("\n")

    assert first_line.endswith(") as f:")
    assert second_line.startswith("        ")


def test_chat_request_is_answered_by_one_valid_function_that_ends(oracle: tuple[Any, Any]) -> None:
    prompt = oracle[1].apply_chat_template(SUM, tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|endoftext|><|user|>{SUM[0]['content']}<|assistant|>"

    answer, end, _ = continued(oracle, prompt, max_tokens=80).partition("<|endoftext|>")

    [function] = ast.parse(answer).body
    assert isinstance(function, ast.FunctionDef)
    assert "sum of two numbers" in (ast.get_docstring(function) or "")
    assert end


def test_card_states_the_figures_of_the_training_records() -> None:
    card = (DEMO_MODEL / "README.md").read_text()
    model, *drafts = (
        json.loads((DEMO_MODEL.parent / folder / "training.json").read_text()) for folder in ("model", "draft", "eagle")
    )

    assert model["is_final"] is True
    assert str(model["held_out"]["loss_per_token"]) in card
    assert str(model["held_out"]["bits_per_byte"]) in card
    for draft in drafts:
        assert f"{draft['accepted_up_to'][0]:.1%}" in card
        assert f"{draft['served']['accepted_a_draft']:.2f}" in card
