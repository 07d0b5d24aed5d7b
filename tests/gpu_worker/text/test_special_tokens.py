"""Special tokens of a tokenizer's files, against those of `AutoTokenizer`."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import transformers
from transformers.models.auto import tokenization_auto as auto

from gpu_worker.text.special_tokens import DEFAULTS, MISNAMED, REGISTERED, default_tokens, read_special_tokens
from gpu_worker.text.spelled_tokens import new_mark
from shared.conversation import ChatMessage
from shared.errors import ConfigError
from tests.gpu_worker.text.conftest import CopiedModel

TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
USER, SYSTEM, END = "<|user|>", "<|system|>", "<|endoftext|>"


def write(copied: CopiedModel, name: str, content: Any) -> None:
    (copied.path / name).write_text(json.dumps(content))


def assert_like_transformers(copied: CopiedModel, *texts: str) -> None:
    """Compare the named tokens, a conversation's prompt and the tokens of texts."""
    oracle: Any = transformers.AutoTokenizer.from_pretrained(copied.path)
    directory = copied.read()
    assert read_special_tokens(directory, directory.read_tokenizer()).texts == oracle.special_tokens_map
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


def listed(content: str, **flags: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | flags
    return {"content": content, **flags}


DECODER = {"0": listed(END), "1": listed(SYSTEM), "2": listed(USER), "3": listed("<|assistant|>")}
ADDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a new named token": ({"pad_token": "[PAD]"}, {}),
    "a named token of the vocabulary": ({"pad_token": "def"}, {}),
    "of the map": ({}, {"pad_token": listed("[PAD]", lstrip=True)}),
    "a listed token": ({"added_tokens_decoder": DECODER | {"4": listed("[PAD]"), "5": listed("def")}}, {}),
    "out of order": ({"added_tokens_decoder": {"9": listed("[9]"), "10": listed("[PAD]")} | DECODER}, {}),
    "listed text": ({"added_tokens_decoder": DECODER | {"4": listed("[PAD]", special=False, normalized=True)}}, {}),
    "named and listed text": (
        {"pad_token": "[PAD]", "added_tokens_decoder": DECODER | {"4": listed("[PAD]", special=False)}},
        {},
    ),
    "other flags": ({"added_tokens_decoder": DECODER | {"2": listed(USER, lstrip=True, rstrip=True)}}, {}),
    "no longer special": ({"added_tokens_decoder": DECODER | {"2": listed(USER, special=False)}}, {}),
    "more tokens": ({"additional_special_tokens": ["[PAD]", "def"]}, {}),
    "more tokens in both": ({"additional_special_tokens": ["[PAD]"]}, {"additional_special_tokens": ["def"]}),
    "a list in both": ({"extra_special_tokens": ["[PAD]"]}, {"extra_special_tokens": ["def"]}),
    "more tokens in the map": ({}, {"additional_special_tokens": ["[PAD]"]}),
    "a name in one, more in the other": (
        {"extra_special_tokens": {"image_token": "[PAD]"}},
        {"additional_special_tokens": ["def"]},
    ),
    "an own name": ({"extra_special_tokens": {"image_token": "[PAD]"}}, {}),
    "the class": ({"tokenizer_class": "CohereTokenizer"}, {}),
}


@pytest.mark.parametrize("case", ADDED)
def test_text_is_split_at_tokens_that_only_the_configuration_has(copied: CopiedModel, case: str) -> None:
    settings, mapped = ADDED[case]
    write(copied, "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    write(copied, "special_tokens_map.json", mapped)
    oracle: Any = transformers.AutoTokenizer.from_pretrained(copied.path)
    tokenizer = copied.tokenizer()
    for text in (f"a [PAD] def undefined [9] b {USER} c", "x[PAD]def", "<BOS_TOKEN>x <PAD>"):
        expected = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_text(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected) == oracle.decode(expected, skip_special_tokens=True)


def test_users_cannot_spell_a_token_that_only_the_configuration_has(copied: CopiedModel) -> None:
    write(copied, "tokenizer_config.json", {"eos_token": "[END]", "chat_template": TEMPLATE})
    tokenizer = copied.tokenizer()
    end = tokenizer.encode_text("[END]")
    assert len(end) == 1
    assert tokenizer.encode_chat([ChatMessage(role="user", content="a[END]b")]).token_ids.count(end[0]) == 1


def test_too_many_added_tokens_are_refused(copied: CopiedModel) -> None:
    write(copied, "tokenizer_config.json", {"additional_special_tokens": [f"<{n}>" * 999 for n in range(999)]})
    with pytest.raises(ConfigError, match="added_tokens have"):
        copied.tokenizer()


def test_entries_of_other_types_name_no_token(copied: CopiedModel) -> None:
    decoder = {"x": listed("a"), "4": None, "5": {"content": 1}}
    settings = {"bos_token": 1, "eos_token": {"content": []}, "additional_special_tokens": [1, None, {}]}
    write(copied, "tokenizer_config.json", settings | {"added_tokens_decoder": decoder, "image_token": ["a"]})
    directory = copied.read()
    tokens = read_special_tokens(directory, directory.read_tokenizer())
    assert (tokens.named, tokens.unnamed, tokens.listed) == ({}, [], {})


def test_token_that_is_no_unicode_is_refused_by_its_text(copied: CopiedModel) -> None:
    (copied.path / "tokenizer_config.json").write_text(r'{"bos_token": "<\ud800>"}')
    with pytest.raises(ConfigError, match=r"'<\\ud800>' of the tokenizer is not valid Unicode"):
        copied.tokenizer()


def test_id_of_thousands_of_digits_names_no_token(copied: CopiedModel) -> None:
    write(copied, "tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}})
    copied.tokenizer()


def test_marks_are_random_digits_of_one_length() -> None:
    marks = {new_mark() for _ in range(100)}
    assert len(marks) == 100
    assert {len(mark) for mark in marks} == {29}
    assert all(mark.isdecimal() for mark in marks)


@pytest.mark.parametrize("name", DEFAULTS)
def test_tokens_are_those_of_the_class(name: str) -> None:
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    given = {key: str(each.default) for key, each in parameters.items() if isinstance(each.default, str)}
    assert DEFAULTS[name] == {key: text for key, text in given.items() if key.endswith("_token")}


def test_kinds_have_the_classes_of_transformers() -> None:
    names = {kind: str(auto.TOKENIZER_MAPPING_NAMES.get(kind)).removesuffix("Fast") for kind in REGISTERED}
    assert names == dict(REGISTERED)
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & REGISTERED.keys()
    assert {kind for kind in wrong if REGISTERED[kind] in DEFAULTS} == MISNAMED


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "LlamaTokenizer"),
        ("llama", "GPT2TokenizerFast"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", None),
        ("mistral", "LlamaTokenizerFast"),
        ("mistral", "Qwen2Tokenizer"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen2", None),
        ("qwen3", "Qwen2Tokenizer"),
        ("qwen3", "PreTrainedTokenizerFast"),
        ("qwen3", "GPT2Tokenizer"),
        ("qwen3", "OwnTokenizer"),
        ("olmoe", None),
        ("phi", "CodeGenTokenizer"),
    ],
)
def test_class_is_chosen_as_transformers_does(copied: CopiedModel, model_type: str, named: str | None) -> None:
    copied.change("config.json", model_type=model_type)
    settings: dict[str, Any] = {} if named is None else {"tokenizer_class": named}
    (copied.path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = transformers.AutoTokenizer.from_pretrained(copied.path).special_tokens_map
    assert default_tokens(model_type, named, is_byte_level=True) == expected


def test_tokenizer_of_llama_2_has_the_tokens_of_its_class() -> None:
    """Its pieces are no bytes."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert default_tokens("llama", "LlamaTokenizer", is_byte_level=False) == tokens
