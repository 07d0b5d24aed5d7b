"""The official SDK against the running system with the demo model: a client that we did not write."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.system import System
from tests.waiting import wait_for

PROMPT = "def read_file(path):\n    with open(path) as"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write a function that adds two numbers."}]


def complete(system: System, **fields: Any) -> Any:
    """Complete the prompt greedily, unless the fields say otherwise."""
    asked = {"model": system.model, "prompt": PROMPT, "temperature": 0} | fields
    return system.client().completions.create(**asked)


def test_chat_stream_adds_up_to_the_whole_answer(system: System) -> None:
    client, model = system.client(), system.model
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    assert (whole.object, whole.choices[0].message.role) == ("chat.completion", "assistant")
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"Cache-Control": "no-cache"},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def _tokenize(system: System, text: str) -> list[int]:
    answer = system.post("/tokenize", {"model": system.model, "prompt": text})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def test_prompt_list_and_n_number_their_choices(system: System) -> None:
    answer = complete(system, prompt=["import os\n", "class Foo"], n=2, max_tokens=6, temperature=0.8, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text for choice in answer.choices)


def test_token_id_prompt_equals_text_prompt(system: System) -> None:
    by_text = complete(system, max_tokens=12)
    by_ids = complete(system, max_tokens=12, prompt=_tokenize(system, PROMPT))
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_same_seed_gives_same_text_and_other_seed_another(system: System) -> None:
    def sample(seed: int) -> str:
        answer = complete(
            system, max_tokens=24, temperature=1.0, seed=seed, extra_headers={"Cache-Control": "no-cache"}
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(1, 6)}) > 1


def test_stop_string_ends_text_before_it_and_is_never_sent_in_parts(system: System) -> None:
    free = complete(system, max_tokens=32).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    stopped = complete(system, max_tokens=32, stop=[stop])
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    stop = free[5:20]
    chunks = complete(system, max_tokens=32, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == free[: free.index(stop)]


def test_chat_logprobs_are_probabilities_of_the_text(system: System) -> None:
    answer = system.client().chat.completions.create(
        model=system.model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.content is not None
    assert (
        b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == answer.choices[0].message.content
    )
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0 + 1e-4


def test_completion_logprobs_have_offsets_into_the_text(system: System) -> None:
    answer = complete(system, max_tokens=6, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(PROMPT)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert answer.choices[0].text[offset : offset + len(token)] == token


def test_logit_bias_can_force_a_token(system: System) -> None:
    token = _tokenize(system, "return")[-1]
    answer = complete(system, max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].text == "return" * 3


def test_repeated_deterministic_request_is_served_from_cache(system: System) -> None:
    def ask() -> tuple[str, int]:
        answer = complete(system, prompt="# cache me\nimport", max_tokens=8)
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].text, (details.cached_tokens or 0) if details else 0

    first, _ = ask()
    second, cached = ask()
    assert second == first
    assert cached > 0


def test_models_can_be_listed_and_retrieved(system: System) -> None:
    client = system.client()
    model = client.models.list().data[0]
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    ("arguments", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -2}, openai.BadRequestError, "max_tokens"),
        ({"top_p": 1.5}, openai.BadRequestError, "top_p"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools.[0].type"),
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
    ],
)
def test_bad_argument_raises_the_matching_sdk_exception(
    system: System, arguments: dict[str, object], error: type[openai.APIStatusError], param: str
) -> None:
    request: dict[str, object] = {"model": system.model, "messages": MESSAGES, "max_tokens": 4} | arguments
    with pytest.raises(error) as raised:
        system.client().chat.completions.create(**request)  # type: ignore[call-overload]
    assert raised.value.param == param
    assert raised.value.body is not None
    assert set(raised.value.body) == {"message", "type", "param", "code"}  # type: ignore[call-overload]


@pytest.mark.parametrize("prompt", [[5] * 5000, "x " * 5000, "x" * 1_000_000], ids=["tokens", "text", "characters"])
def test_prompt_longer_than_context_is_a_bad_request_in_words_that_clients_know(
    system: System, prompt: str | list[int]
) -> None:
    # By the first half LangChain raises its ContextOverflowError, by the second LiteLLM its ContextWindowExceededError.
    words = "This model's maximum context length is .*prompt is too long"
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        system.client().completions.create(model=system.model, prompt=prompt, max_tokens=4)
    assert (raised.value.param, raised.value.code) == ("prompt", "context_length_exceeded")


def test_own_deadline_ends_the_request_and_is_not_retried(simulated: System) -> None:
    model, sent = simulated.model, list[httpx2.Request]()
    client = simulated.client(max_retries=5)
    client._client.event_hooks = {"request": [sent.append], "response": []}
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(
            model=model,
            prompt="x",
            max_tokens=2000,
            extra_body={"timeout": 0.3, "ignore_eos": True},
        )
    # Ten seconds before its last token, and once.
    assert (raised.value.status_code, len(sent)) == (408, 1)


def test_wrong_key_raises_authentication_error(system: System) -> None:
    with pytest.raises(openai.AuthenticationError):
        system.client(api_key="hr-wrong").models.list()


async def test_64_concurrent_streams_all_complete_with_their_own_text(system: System) -> None:
    client, model = system.async_client(), system.model

    async def stream(seed: int) -> str:
        chunks = await client.completions.create(
            model=model,
            prompt=f"# {seed}\ndef f{seed}(",
            max_tokens=16,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])
        assert text
        return text

    texts = await asyncio.gather(*(stream(seed) for seed in range(64)))
    alone = await client.completions.create(
        model=model,
        prompt="# 9\ndef f9(",
        max_tokens=16,
        seed=9,
        extra_body={"ignore_eos": True},
        extra_headers={"Cache-Control": "no-cache"},
    )
    assert texts[9] == alone.choices[0].text
    await client.close()


def test_response_counts_its_input_and_goes_on(system: System) -> None:
    client, model = system.client(), system.model
    first = client.responses.create(model=model, input="def add(a, b):", max_output_tokens=8, temperature=0)
    counted = client.responses.input_tokens.count(model=model, input="def add(a, b):")
    assert counted.input_tokens == first.usage.input_tokens
    second = client.responses.create(
        model=model, input="go on", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    assert second.usage.input_tokens > first.usage.total_tokens
    with client.responses.stream(model=model, input="def add(a, b):", max_output_tokens=8, temperature=0) as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == first.output_text


def test_long_conversation_is_shortened_to_the_context(system: System) -> None:
    client, model = system.client(), system.model
    context = client.models.retrieve(model).to_dict()["max_model_len"]
    assert isinstance(context, int)
    turn = {"role": "user", "content": "def add(a, b): " * (context // 60)}
    asked: Any = {"model": model, "input": [turn] * 30, "truncation": "auto"}
    counted = client.responses.input_tokens.count(**asked, extra_body={"max_output_tokens": 1})
    response = client.responses.create(**asked, max_output_tokens=1, temperature=0)
    assert response.truncation == "auto"
    assert context // 2 < response.usage.input_tokens == counted.input_tokens < context
    for refused in ({"truncation": "disabled"}, {"input": "def add(a, b): " * context}):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.responses.create(**asked | refused)
        assert refusal.value.code == "context_length_exceeded"


def test_background_response_is_computed_without_its_client(system: System) -> None:
    client = system.client()
    response = client.responses.create(model=system.model, input="x = ", background=True, max_output_tokens=8)
    wait_for(lambda: client.responses.retrieve(response.id).status in ("completed", "incomplete"))
    response = client.responses.retrieve(response.id)
    assert response.usage.output_tokens > 0
