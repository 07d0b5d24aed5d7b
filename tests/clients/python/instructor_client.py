"""Instructor: answers as pydantic models, by a schema and by tools."""

from __future__ import annotations

import instructor
import openai
from cells import KEY, MODEL, URL, run
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [{"role": "user", "content": "Somebody, please."}]


class Person(BaseModel):
    """Somebody."""

    # Otherwise the schema allows more properties, of which a model without sense makes up one after another.
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def ask(mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Person, max_tokens=1000, max_retries=0
    )
    assert isinstance(found, Person)


run(
    {
        "JSON schema": lambda: ask(instructor.Mode.JSON_SCHEMA),
        "tool call": lambda: ask(instructor.Mode.TOOLS_STRICT),
    }
)
