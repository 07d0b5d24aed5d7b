"""Special tokens of a tokenizer's files, against those of `AutoTokenizer`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from gpu_worker.text.special_tokens import read_special_tokens
from shared.conversation import ChatMessage
from tests.gpu_worker.text.conftest import CopiedModel

TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
USER, SYSTEM, END = "<|user|>", "<|system|>", "<|endoftext|>"


def write(copied: CopiedModel, name: str, content: Any) -> None:
    (copied.path / name).write_text(json.dumps(content))


def assert_like_transformers(copied: CopiedModel, *texts: str) -> None:
    """Compare the named tokens, a conversation's prompt and the tokens of texts."""
    oracle: Any = transformers.AutoTokenizer.from_pretrained(copied.path)
    directory = copied.read()
    assert read_special_tokens(directory, directory.read_tokenizer()) == oracle.special_tokens_map
    expected = oracle.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=True, return_dict=False)
    tokenizer = copied.tokenizer()
    assert tokenizer.encode_chat([ChatMessage(role="user", content="hello")]).token_ids == expected
    for text in texts:
        assert tokenizer.encode_text(text) == oracle(text)["input_ids"]


NAMED = {"bos_token": USER, "eos_token": SYSTEM}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only the map": ({}, NAMED),
    "the map goes first": ({"bos_token": SYSTEM, "eos_token": USER}, NAMED),
    "null in the map": (NAMED, {"bos_token": None}),
    "the map is not read": ({"eos_token": USER, "added_tokens_decoder": {}}, NAMED),
    "objects": ({}, {"bos_token": {"content": USER, "lstrip": False}, "eos_token": SYSTEM}),
}


@pytest.mark.parametrize("case", CASES)
def test_named_tokens_come_from_both_files_in_the_order_of_transformers(copied: CopiedModel, case: str) -> None:
    settings, mapped = CASES[case]
    write(copied, "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    write(copied, "special_tokens_map.json", mapped)
    assert_like_transformers(copied)


OWN = "{{ image_token }}|{{ other_token }}|" + TEMPLATE
AS_OBJECT = {"__type": "AddedToken", "content": SYSTEM, "special": True}
OWN_NAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "extra tokens with names": ({"extra_special_tokens": {"image_token": USER, "other_token": AS_OBJECT}}, {}),
    "fields": ({"image_token": USER, "other_token": AS_OBJECT}, {}),
    "fields of the map": ({}, {"image_token": USER}),
    "a text goes before the map": ({"image_token": SYSTEM}, {"image_token": USER}),
    "an object does not": ({"image_token": AS_OBJECT}, {"image_token": USER}),
    "both": ({"image_token": USER, "extra_special_tokens": {"image_token": SYSTEM}}, {}),
    "names of the map": (
        {"extra_special_tokens": {"image_token": SYSTEM, "other_token": END}},
        {"extra_special_tokens": {"image_token": USER}},
    ),
    "a list in the map": ({"extra_special_tokens": {"image_token": SYSTEM}}, {"extra_special_tokens": [USER]}),
    "a flag": ({"image_token": USER, "add_bos_token": True}, {}),
}


@pytest.mark.parametrize("case", OWN_NAMES)
def test_templates_have_the_tokens_that_the_model_names_itself(copied: CopiedModel, case: str) -> None:
    settings, mapped = OWN_NAMES[case]
    write(copied, "tokenizer_config.json", settings | {"chat_template": OWN})
    write(copied, "special_tokens_map.json", mapped)
    assert_like_transformers(copied)


def test_no_token_hides_the_messages(copied: CopiedModel) -> None:
    named = {"messages": USER, "add_generation_prompt": "x"}
    settings = {"extra_special_tokens": named, "chat_template": TEMPLATE}
    write(copied, "tokenizer_config.json", settings)
    tokenizer = copied.tokenizer()
    assert tokenizer.decode(tokenizer.encode_chat([ChatMessage(role="user", content="hello")]).token_ids) == "hello"
