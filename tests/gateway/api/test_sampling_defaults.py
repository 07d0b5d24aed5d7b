"""What a model's files advise of sampling takes the place of what a client has left out, and of nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.api.model_abilities import with_defaults
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.generation import Generation
from shared.sampling import SamplingDefaults

ADVISED = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Generation:
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


def chosen(generation: Generation, defaults: SamplingDefaults | None = ADVISED) -> tuple[float, ...]:
    sampling = with_defaults(generation, defaults).sampling
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty


def test_what_is_left_out_is_as_the_model_advises_on_every_endpoint() -> None:
    every = (0.6, 0.95, 20, 0.01, 1.05)
    assert chosen(chat()) == every
    assert chosen(chat(temperature=None, top_p=None)) == every
    assert chosen(parse_completion(b'{"model":"m","prompt":"x"}')) == every
    body = {"model": "m", "max_tokens": 5, "messages": MESSAGES}
    assert chosen(parse_messages(json.dumps(body).encode())) == every
    assert chosen(parse_messages(json.dumps(body | {"temperature": 1}).encode())) == (1.0, 0.95, 20, 0.01, 1.05)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1.0}, (1.0, 0.95, 20, 0.01, 1.05)),
        ({"top_p": 1, "top_k": -1}, (0.6, 1.0, 0, 0.01, 1.05)),
        ({"top_k": 0, "min_p": 0}, (0.6, 0.95, 0, 0.0, 1.05)),
        ({"repetition_penalty": 1.0}, (0.6, 0.95, 20, 0.01, 1.0)),
        ({"repeat_penalty": 1.2}, (0.6, 0.95, 20, 0.01, 1.2)),
    ],
)
def test_what_is_named_stays(fields: dict[str, float], expected: tuple[float, ...]) -> None:
    assert chosen(chat(**fields)) == expected


@pytest.mark.parametrize("defaults", [None, SamplingDefaults()])
def test_model_that_advises_nothing_leaves_the_request_as_it_is(defaults: SamplingDefaults | None) -> None:
    generation = chat()
    assert with_defaults(generation, defaults) is generation
    assert chosen(generation, defaults) == (1.0, 1.0, 0, 0.0, 1.0)


def test_model_that_advises_the_likeliest_token_makes_equal_requests_equal() -> None:
    greedy = SamplingDefaults(temperature=0.0)
    assert with_defaults(chat(), greedy).sampling == chat(temperature=0).sampling
    assert with_defaults(chat(), greedy).deterministic
    assert with_defaults(chat(seed=7), greedy).sampling.seed == 7
    assert not with_defaults(chat(temperature=1), greedy).deterministic


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"seed": 7}])
def test_model_that_advises_the_likeliest_token_makes_no_more_sequences_than_are_told(fields: dict[str, Any]) -> None:
    """All of a prompt are equal, as where the client asks for a temperature of 0."""
    greedy = SamplingDefaults(temperature=0.0)
    ranked = with_defaults(chat(best_of=5, n=2, **fields), greedy)
    assert (ranked.n, ranked.num_choices, ranked.ranking) == (2, 2, None)
    assert ranked.sampling == chat(n=2, temperature=0, **fields).sampling
    assert with_defaults(chat(best_of=5, n=2, temperature=1, **fields), greedy).n == 5
