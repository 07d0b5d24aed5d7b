"""DSPy, which writes prompts from signatures and reads the answers back, by way of LiteLLM."""

from __future__ import annotations

import dspy
from cells import KEY, MODEL, SCHEMA, URL, run
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


class Store(dspy.Signature):
    """Name somebody."""

    question: str = dspy.InputField()
    person: Person = dspy.OutputField()


def model(**settings: object) -> dspy.LM:
    return dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, cache=False, num_retries=0, **settings)


def chat() -> None:
    assert isinstance(model(max_tokens=8)("hello")[0], str)


def text() -> None:
    assert isinstance(model(max_tokens=8, model_type="text")("hello")[0], str)


def choices() -> None:
    assert len(model(max_tokens=8, n=2, temperature=1.0)("hello")) == 2


def structured() -> None:
    # DSPy asks for a schema only of models that it knows; of others the caller does.
    schema = {"type": "object", "properties": {"person": SCHEMA}, "required": ["person"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with dspy.context(lm=model(max_tokens=1000, response_format=wanted), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Store)(question="Who?")
    assert isinstance(answer.person, Person)


def response() -> None:
    answer = model(max_tokens=16, model_type="responses")("hello")[0]
    assert answer


run(
    {
        "chat": chat,
        "text completion": text,
        "choices and logprobs": choices,
        "JSON schema": structured,
        "Responses": response,
    }
)
