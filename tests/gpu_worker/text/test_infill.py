from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from gpu_worker.text.infill import InfillPrompt, InfillTokens, find_infill_tokens
from gpu_worker.text.prompt_encoder import PromptEncoder
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from tests.gpu_worker.text.conftest import CopiedModel


def with_tokens(model: CopiedModel, names: list[str]) -> ModelTokenizer:
    """Return the tokenizer of a model, with these special tokens added."""
    file = str(model.path / "tokenizer.json")
    library = Tokenizer.from_file(file)
    library.add_special_tokens([AddedToken(name, special=True) for name in names])
    library.save(file)
    model.change("config.json", vocab_size=library.get_vocab_size())
    return model.tokenizer()


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "prefix, text, suffix, text, middle"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "prefix, text, suffix, text, middle"),
        (["[PREFIX]", "[SUFFIX]"], "suffix, text, prefix, text"),
    ],
)
def test_prompt_has_the_models_own_tokens(copied: CopiedModel, names: list[str], order: str) -> None:
    tokenizer = with_tokens(copied, names)
    before, behind = (tokenizer.encode_text(text, add_special_tokens=False) for text in ("def f(", "return x"))
    ids = dict(
        zip(("prefix", "suffix", "middle"), ([tokenizer._tokenizer.token_to_id(n)] for n in names), strict=False)
    )
    texts = iter((behind, before) if order.startswith("suffix") else (before, behind))
    expected = [token_id for part in order.split(", ") for token_id in (next(texts) if part == "text" else ids[part])]
    begin = tokenizer._tokenizer.encode("").ids
    assert tokenizer.encode_infill(InfillPrompt("def f(", "return x")) == [*begin, *expected]
    assert tokenizer.encode_infill(InfillPrompt("def f(", "return x"), add_special_tokens=False) == expected
    assert PromptEncoder(tokenizer, 100).encode_now(InfillPrompt("def f(", "return x")).token_ids == [*begin, *expected]


def test_model_without_such_tokens_refuses_a_suffix(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(BadRequestError, match="cannot fill in") as caught:
        tokenizer.encode_infill(InfillPrompt("a", "b"))
    assert caught.value.param == "suffix"


def test_tokens_count_only_where_all_are_there() -> None:
    assert find_infill_tokens({"<fim_prefix>": 1, "<fim_suffix>": 2}.get) is None
    assert find_infill_tokens({"[PREFIX]": 1, "[SUFFIX]": 2}.get) == InfillTokens(1, 2, None)
