"""Ids that the model does not have, wherever they come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ops
from gpu_worker.consumer.answer import PooledAnswers
from gpu_worker.consumer.request_reader import RequestBudgets, RequestReader
from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import read_model_tasks
from gpu_worker.text.prompt_encoder import ScoredText
from gpu_worker.text.tokenizer import InfillPrompt, ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.media import ContentImage, MediaRef
from shared.messages import Request
from shared.pooling import Pooling
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import BUDGETS, SIZES

SIZE = 1000


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    """Reads for a model that has fewer tokens than its tokenizer."""
    whole = read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")
    directory = dataclasses.replace(whole, vocab_size=SIZE)
    tokenizer = ModelTokenizer(directory)
    pooled = PooledAnswers(read_model_tasks(directory, tokenizer))
    return RequestReader("m", directory, 2048, tokenizer, pooled, BUDGETS)


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
        ({"sampling": Sampling(allowed_token_ids=(3, SIZE))}, "allowed_token_ids"),
        ({"sampling": Sampling(logprobs=0, logprob_token_ids=(3, SIZE))}, "logprob_token_ids"),
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


@pytest.mark.parametrize(
    ("limit", "max_tokens", "num_left"),
    [(None, 5, 3000), (10, 5, 10), (5000, 5, 3000), (0, 5, 1), (-1, 48, 2000), (-1, None, 2047), (-1, 9999, 1)],
)
def test_prompt_keeps_its_last_tokens(
    reader: RequestReader, limit: int | None, max_tokens: int | None, num_left: int
) -> None:
    prompt_ids = list(range(3000))
    asked = request(text="x", truncate_prompt_tokens=limit, sampling=Sampling(max_tokens=max_tokens))
    assert reader.truncated(asked, prompt_ids) == prompt_ids[-num_left:]


def test_texts_that_are_embedded_have_no_more_tokens_than_the_model_reads() -> None:
    directory = read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")
    tokenizer = ModelTokenizer(directory)
    tasks = dataclasses.replace(read_model_tasks(directory, tokenizer), max_tokens=7)
    reader = RequestReader("m", directory, 2048, tokenizer, PooledAnswers(tasks), BUDGETS)
    prompt_ids = list(range(20))

    def left(limit: int | None, **pooling: Any) -> list[int]:
        asked = request(token_ids=tuple(prompt_ids), truncate_prompt_tokens=limit, pooling=Pooling(**pooling))
        return reader.truncated(asked, prompt_ids)

    assert [left(limit) for limit in (-1, 3, 9, 0)] == [prompt_ids[:count] for count in (7, 3, 7, 1)]
    with pytest.raises(BadRequestError, match=r"at most 7 can fit.*'truncate_prompt_tokens': -1") as caught:
        left(None)
    assert caught.value.code == "context_length_exceeded"
    scored = request(text="x", truncate_prompt_tokens=-1, pooling=Pooling(task="score", query="q"))
    assert reader.prompt(scored) == ScoredText("q", "x", max_tokens=7)
    assert reader.truncated(request(text="x"), prompt_ids) == prompt_ids


def test_prompts_share_blocks_where_tenant_and_salt_are_equal(reader: RequestReader) -> None:
    asked = [("a", None), ("a", "b"), ("ab", None), ("a", "c"), ("1:a", None), ("1:a", "b")]
    salts = [
        reader.sequence(request(text="x", tenant=tenant, cache_salt=salt), "s", [5], []).salt for tenant, salt in asked
    ]
    assert len(set(salts)) == len(asked)


def test_bad_words_are_runs_of_tokens_with_a_space_before_and_without(reader: RequestReader) -> None:
    asked = request(text="x", sampling=Sampling(bad_words=("cat", " cat")))
    words = reader.sequence(asked, "s", [5], []).bad_words
    assert len(words) == len(set(words)) == 2
    assert all(token_id < SIZE for word in words for token_id in word)


def test_bad_words_that_leave_no_allowed_token_are_refused(reader: RequestReader) -> None:
    whole = request(text="x", sampling=Sampling(bad_words=("e",)))
    [single] = [word for word in reader.sequence(whole, "s", [5], []).bad_words if len(word) == 1][:1]
    sampling = Sampling(bad_words=("e",), allowed_token_ids=single)
    with pytest.raises(BadRequestError) as caught:
        reader.sequence(request(text="x", sampling=sampling), "s", [5], [])
    assert caught.value.param == "bad_words"


def test_suffix_belongs_to_a_text(reader: RequestReader) -> None:
    assert reader.prompt(request(text="a", suffix="b")) == InfillPrompt("a", "b")
    with pytest.raises(BadRequestError) as caught:
        reader.prompt(request(token_ids=(1,), suffix="b"))
    assert caught.value.param == "suffix"


def test_prelude_holds_the_prompt_that_counts(reader: RequestReader) -> None:
    asked = request(text="x y", echo=True, truncate_prompt_tokens=1, return_prompt_token_ids=True)
    prelude = reader.prelude(asked, [5])
    assert prelude.token_ids == (5,)
    assert prelude.text != "x y"


def test_request_for_another_model_names_the_field(reader: RequestReader) -> None:
    with pytest.raises(BadRequestError, match="serves 'm', not 'other'") as error:
        reader.prompt(Request(id="r", model="other", text="x"))
    assert error.value.param == "model"


def test_model_that_reads_text_refuses_images(reader: RequestReader) -> None:
    image = MediaRef(digest=bytes(32), num_bytes=1, width=1, height=1, mime="image/png")
    message = ChatMessage(role="user", content="x")
    seen = ChatMessage(role="user", content="x", images=(ContentImage(0, 0),))
    for fields in ({"messages": (message,), "media": (image,)}, {"messages": (seen,)}):
        with pytest.raises(BadRequestError, match="The model 'm' reads no images") as e:
            reader.prompt(request(**fields))
        assert e.value.param == "media"


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("top_k", 1)])
def test_watermark_that_has_nothing_to_mark_is_refused(reader: RequestReader, name: str, value: float) -> None:
    sampling = Sampling(watermark="0" * 64, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match=f"'{name}' is ") as caught:
        reader.prompt(request(text="x", sampling=sampling))
    assert (caught.value.param, caught.value.code) == (name, "watermark_needs_chance")


def test_tenant_whose_answers_are_marked_gets_none_without_a_key() -> None:
    directory = read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")
    tokenizer = ModelTokenizer(directory)
    pooled = PooledAnswers(read_model_tasks(directory, tokenizer))
    reader = RequestReader("m", directory, 2048, tokenizer, pooled, BUDGETS, watermark_tenants=["acme"])
    reader.prompt(request(text="x"))
    reader.prompt(request(text="x", tenant="acme", sampling=Sampling(watermark="0" * 64)))
    with pytest.raises(BadRequestError, match="'acme' carry a watermark") as caught:
        reader.prompt(request(text="x", tenant="acme"))
    assert caught.value.code == "watermark_required"


def test_budget_is_read_in_whole_blocks(reader: RequestReader) -> None:
    asked = request(token_ids=(1, 2), kv_budget=KvBudget(1000), sampling=Sampling(max_tokens=100_000))
    reader.prompt(asked)
    sequence = reader.sequence(asked, "a", [1, 2], [])
    assert sequence.budget == BlockBudget(num_blocks=62, num_sinks=1, num_evicted=7, block_size=16)
    # The text may outgrow the context where its length was asked for.
    assert sequence.max_tokens == 100_000
    assert reader.sequence(request(token_ids=(1, 2), kv_budget=KvBudget(1000)), "a", [1, 2], []).max_tokens == 2046
    assert reader.sequence(request(token_ids=(1, 2)), "a", [1, 2], []).budget is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_budget": KvBudget(63)}, r"kv_budget\.tokens is 63, but it must be 64 to 2048 here\."),
        ({"kv_budget": KvBudget(2064)}, r"kv_budget\.tokens is 2064, but it must be 64 to 2048 here\."),
        ({"kv_budget": KvBudget(500), "pooling": Pooling(task="embed")}, "because the request generates nothing"),
    ],
)
def test_budget_that_cannot_be_kept_to_is_refused(reader: RequestReader, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        reader.prompt(request(text="x", **fields))
    assert caught.value.param == "kv_budget"


def test_attempt_repeats_what_was_evicted_with_blocks_of_its_size(reader: RequestReader) -> None:
    asked = request(token_ids=(1, 2), kv_budget=KvBudget(256, "heavy_hitters"), evicted=EvictedBlocks(16, (1, 7, 2, 3)))
    scores = reader.sequence(asked, "a", [1, 2], []).scores
    assert scores is not None
    assert scores.decisions == [(1, 7), (2, 3)]
    # A long prompt has them too, however little is generated.
    short = msgspec.structs.replace(asked, sampling=Sampling(max_tokens=1))
    scores = reader.sequence(short, "a", [1] * 1000, []).scores
    assert scores is not None
    assert scores.decisions == [(1, 7), (2, 3)]
    other = msgspec.structs.replace(asked, evicted=EvictedBlocks(32, (1, 2)))
    scores = reader.sequence(other, "a", [1, 2], []).scores
    assert scores is not None
    assert scores.decisions == []
    sinks = msgspec.structs.replace(asked, kv_budget=KvBudget(256))
    assert reader.sequence(sinks, "a", [1, 2], []).scores is None


@pytest.mark.parametrize("places", [(1,), (3, 1), (1, 1), (0, 1), (1, 16), (1, 2, 3), (1, 2) * 6, (1, 2) * 10_000])
def test_evictions_that_cannot_have_been_are_decided_again(reader: RequestReader, places: tuple[int, ...]) -> None:
    """Sixteen blocks, of which two leave at once, never the first; 400 tokens make five evictions."""
    sampling = Sampling(max_tokens=398)
    asked = request(
        text="x", kv_budget=KvBudget(256, "persistence"), evicted=EvictedBlocks(16, places), sampling=sampling
    )
    reader.prompt(asked)
    scores = reader.sequence(asked, "a", [1, 2], []).scores
    assert scores is not None
    assert scores.decisions == []
    known = msgspec.structs.replace(asked, evicted=EvictedBlocks(16, (1, 2) * 5))
    scores = reader.sequence(known, "a", [1, 2], []).scores
    assert scores is not None
    assert scores.decisions == [(1, 2)] * 5


@pytest.mark.parametrize("fields", [[16, [1] * 65_537], [16, [1], 65_536], [0, []], [1 << 20, [1, 1]]])
def test_more_evictions_than_any_text_has_blocks_are_not_read(fields: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, EvictedBlocks)
    assert len(msgspec.convert([16, [1] * 65_536], EvictedBlocks).places) == 65_536


def test_model_that_cannot_evict_says_why() -> None:
    budgets = RequestBudgets(SIZES, "its attention is latent")
    with pytest.raises(
        BadRequestError, match="no tokens can be evicted here, because its attention is latent"
    ) as caught:
        budgets.read(request(text="x", kv_budget=KvBudget(500)))
    assert caught.value.code == "unsupported_kv_budget"
    assert budgets.read(request(text="x")) is None
