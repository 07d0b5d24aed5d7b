"""LiteLLM, which turns one call into those of many providers."""

from __future__ import annotations

import json

import litellm
from cells import KEY, MODEL, NUM_SEEN, PICTURE_URL, SCHEMA, SEEING, URL, check_person, run

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "Somebody, please."}]
TOOL = {"type": "function", "function": {"name": "person", "parameters": SCHEMA, "strict": True}}
PLACE = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "timeout": 120}


def ask(**fields: object) -> object:
    return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **PLACE, **fields)


def chat() -> None:
    answer = ask(max_tokens=8)
    assert answer.choices[0].message.content
    assert 1 <= answer.usage.completion_tokens <= 8


def stream() -> None:
    chunks = list(ask(max_tokens=8, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content
    assert 1 <= whole.usage.completion_tokens <= 8


def text() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="x", max_tokens=4, **PLACE)
    assert answer.choices[0].text


def best_of() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="x",
        max_tokens=4,
        best_of=3,
        extra_body={"ignore_eos": True},
        **PLACE,
    )
    assert (len(answer.choices), answer.usage.completion_tokens) == (1, 12)


def json_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(json.loads(ask(max_tokens=400, response_format=wanted).choices[0].message.content))


def tool_call() -> None:
    answer = ask(max_tokens=400, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    check_person(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))


def embeddings() -> None:
    assert len(litellm.embedding(model=f"openai/{MODEL}", input=["a", "b"], **PLACE).data) == 2


def errors() -> None:
    try:
        litellm.completion(model=f"openai/{MODEL}", messages=[{"role": "user", "content": "word " * 100_000}], **PLACE)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt without end was taken")


def anthropic_messages() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", messages=MESSAGES, max_tokens=8, api_base=URL, api_key=KEY, timeout=120
    )
    assert answer.choices[0].message.content


def images() -> None:
    content = [{"type": "image_url", "image_url": {"url": PICTURE_URL}}, {"type": "text", "text": "Look"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "api_key": SEEING.key}
    for kind, place in (("openai", f"{SEEING.url}/v1"), ("anthropic", SEEING.url)):
        answer = litellm.completion(model=f"{kind}/{SEEING.model}", api_base=place, timeout=120, **asked)
        assert answer.usage.prompt_tokens == NUM_SEEN, answer.usage


run(
    {
        "chat": chat,
        "stream with usage": stream,
        "text completion": text,
        "best_of": best_of,
        "JSON schema": json_schema,
        "tool call": tool_call,
        "embeddings": embeddings,
        "typed errors": errors,
        "Messages": anthropic_messages,
        "images": images,
    }
)
