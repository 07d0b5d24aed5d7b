"""CrewAI: its own client for OpenAI's API, and an agent with a task."""

from __future__ import annotations

import os

# It tells its makers of every run otherwise.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from cells import KEY, MODEL, URL, run
from crewai import LLM, Agent, Crew, Task
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def llm(**options: object) -> LLM:
    return LLM(
        **{"model": MODEL, "provider": "openai", "base_url": f"{URL}/v1", "api_key": KEY, "max_tokens": 8, **options}
    )


def chat() -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["zzz"], "frequency_penalty": 0.1}
    assert llm(**settings).call([{"role": "user", "content": "hello"}])


def stream() -> None:
    assert llm(stream=True).call("hello")


def json_schema() -> None:
    assert isinstance(llm(max_tokens=400).call("Somebody, please.", response_model=Person), Person)


def turn() -> None:
    agent = Agent(role="writer", goal="brevity", backstory="none", llm=llm(), max_iter=1)
    task = Task(description="Say hello.", expected_output="hello", agent=agent)
    assert Crew(agents=[agent], tasks=[task]).kickoff().raw


run({"chat": chat, "stream": stream, "JSON schema": json_schema, "turn of an agent": turn})
