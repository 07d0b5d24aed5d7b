"""Ids that the model does not have, wherever they come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import ops
from gpu_worker.consumer.request_reader import RequestReader
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError
from shared.messages import Request
from shared.sampling import Sampling

SIZE = 1000


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    """Reads for a model that has fewer tokens than its tokenizer."""
    whole = read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")
    directory = dataclasses.replace(whole, vocab_size=SIZE)
    return RequestReader("m", directory, 2048, ModelTokenizer(directory))


def request(**fields: Any) -> Request:
    return Request(id="r", model="m", **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "x"}, "prompt"),
        ({"token_ids": (1,)}, "prompt"),
        ({"messages": (ChatMessage(role="user", content="x"),)}, "messages"),
    ],
)
@pytest.mark.parametrize("token_id", [SIZE, SIZE + 1, 2**31 - 1, -1])
def test_prompt_with_a_token_that_the_model_does_not_have_names_the_field(
    reader: RequestReader, fields: dict[str, Any], param: str, token_id: int
) -> None:
    with pytest.raises(
        BadRequestError, match=f"token id {token_id} is not one of this model's, which are 0 to 999"
    ) as e:
        reader.sequence(request(**fields), "s", [5, token_id, 7], [])
    assert e.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"emitted": (SIZE,)}, "emitted"),
        ({"sampling": Sampling(logit_bias={SIZE: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(stop_token_ids=(3, SIZE))}, "stop_token_ids"),
    ],
)
def test_other_tokens_that_the_model_does_not_have_name_their_field(
    reader: RequestReader, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        reader.prompt(request(text="x", **fields))
    assert caught.value.param == param


def test_last_token_of_the_model_is_one_of_its_own(reader: RequestReader) -> None:
    last = SIZE - 1
    sampling = Sampling(logit_bias={last: 1.0}, stop_token_ids=(last,))
    asked = request(token_ids=(last,), emitted=(last,), sampling=sampling)
    assert reader.prompt(asked) == [last]
    assert reader.sequence(asked, "s", [last], []).token_ids == [last, last]


def test_prediction_ends_before_the_first_token_that_the_model_does_not_have(reader: RequestReader) -> None:
    assert reader.sequence(request(text="x"), "s", [5], [1, 2, SIZE, 3]).prediction == (1, 2)
