"""Parameters from the client's body to the sampler and back, in the running system with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.integration.system import System

PROMPT = "def read_file(path):\n    with open(path) as"
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]


class Client:
    """Sends bodies as they are."""

    def __init__(self, system: System, http: httpx2.Client) -> None:
        self._system = system
        self._http = http
        self.model = system.model

    def post(self, path: str, **body: Any) -> httpx2.Response:
        headers = self._system.headers() | {"Cache-Control": "no-cache"}
        body = {"model": self.model, "temperature": 0, **body}
        return self._http.post(f"{self._system.url}{path}", json=body, headers=headers, timeout=60)

    def complete(self, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", **{"prompt": prompt, "max_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def choice(self, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
        return self.complete(prompt, **body)["choices"][0]  # type: ignore[no-any-return]

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        lines = self.post(path, stream=True, **body).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        return [json.loads(event) for event in events]


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[Client]:
    with httpx2.Client() as http:
        yield Client(system, http)


def test_only_allowed_tokens_come(client: Client) -> None:
    choice = client.choice(allowed_token_ids=[40, 41, 42], return_token_ids=True, temperature=1.0, ignore_eos=True)
    assert set(choice["token_ids"]) <= {40, 41, 42}
    assert len(choice["token_ids"]) == 12


def test_listed_tokens_are_reported_in_every_api_with_log_probabilities(client: Client) -> None:
    listed = [40, 41, 42]
    choice = client.choice(logprobs=0, logprob_token_ids=listed, return_tokens_as_token_ids=True, max_tokens=3)
    own = choice["logprobs"]["tokens"]
    assert [set(top) for top in choice["logprobs"]["top_logprobs"]] == [
        {f"token_id:{token_id}" for token_id in listed} | {token} for token in own
    ]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
    answer = client.post("/v1/chat/completions", **chat, logprobs=True, logprob_token_ids=listed).json()
    assert [len(entry["top_logprobs"]) for entry in answer["choices"][0]["logprobs"]["content"]] == [3, 3]
    included = {"include": ["message.output_text.logprobs"], "logprob_token_ids": listed, "max_output_tokens": 2}
    answer = client.post("/v1/responses", input="Hi", **included).json()
    assert {len(entry["top_logprobs"]) for entry in answer["output"][-1]["content"][0]["logprobs"]} == {3}


def test_bad_word_does_not_come(client: Client) -> None:
    plain = client.choice(max_tokens=20)["text"]
    word = max(plain.split(), key=len)
    assert word not in client.choice(max_tokens=20, bad_words=[word])["text"].split()


def test_end_comes_behind_the_least_tokens(client: Client) -> None:
    first = client.choice(return_token_ids=True)["token_ids"]
    stops = {"stop_token_ids": [first[2]], "return_token_ids": True}
    assert len(client.choice(**stops)["token_ids"]) <= 3
    assert len(client.choice(**stops, min_tokens=9)["token_ids"]) >= 9


def test_stop_string_is_part_of_the_text_where_asked_for(client: Client) -> None:
    text = client.choice()["text"]
    stop = text[4:7]
    cut = text.index(stop)
    assert client.choice(stop=stop)["text"] == text[:cut]
    assert client.choice(stop=stop, include_stop_str_in_output=True)["text"] == text[: cut + len(stop)]


def test_token_ids_of_prompt_and_answer_are_those_that_it_was_made_of(client: Client) -> None:
    choice = client.choice(return_token_ids=True)
    again = client.choice(choice["prompt_token_ids"], return_token_ids=True)
    assert again["token_ids"] == choice["token_ids"]
    chunks = client.chunks("/v1/completions", prompt=PROMPT, max_tokens=12, return_token_ids=True)
    streamed = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    told = [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    assert told == [choice["prompt_token_ids"]]


def test_prompt_gets_no_tokens_but_its_own_where_asked_for(client: Client) -> None:
    ids = client.choice(return_token_ids=True)["prompt_token_ids"]
    bare = client.choice(add_special_tokens=False, return_token_ids=True)["prompt_token_ids"]
    assert bare == ids[len(ids) - len(bare) :]
    begin = client.choice("", return_token_ids=True)["prompt_token_ids"]
    assert len(bare) == len(ids) - (ids[:1] == begin)


def test_truncated_prompt_is_the_same_as_its_end(client: Client) -> None:
    ids = client.choice(return_token_ids=True)["prompt_token_ids"]
    cut = client.choice(truncate_prompt_tokens=4, return_token_ids=True)
    assert cut["prompt_token_ids"] == ids[-4:]
    assert cut["text"] == client.choice(ids[-4:])["text"]
    long = client.complete("word " * 20_000, truncate_prompt_tokens=-1, max_tokens=7)
    assert long["usage"]["completion_tokens"] == 7


def test_log_probabilities_of_the_prompt_stand_apart(client: Client) -> None:
    answer = client.choice(prompt_logprobs=2, logprobs=1, return_token_ids=True)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for token_id, entries in zip(answer["prompt_token_ids"][1:], others, strict=True):
        assert entries[str(token_id)]["logprob"] <= 0
        assert {1, 2} <= {entry["rank"] for entry in entries.values()}
    assert len(answer["logprobs"]["tokens"]) == len(answer["token_ids"])
    body = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": -1, "return_token_ids": True}
    chat = client.post("/v1/chat/completions", **body).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert max(map(len, chat["prompt_logprobs"][1:])) >= 20


def test_tokens_are_called_by_their_ids(client: Client) -> None:
    choice = client.choice(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_tokens_of_an_echoed_prompt_are_called_by_their_ids(client: Client, more: dict[str, bool]) -> None:
    asked = client.choice(return_token_ids=True, max_tokens=2)
    expected = [f"token_id:{token_id}" for token_id in asked["prompt_token_ids"] + asked["token_ids"]]
    body = {"logprobs": 1, "echo": True, "return_tokens_as_token_ids": True, "max_tokens": 2, **more}
    choice = client.choice(**body)
    assert choice["logprobs"]["tokens"] == expected
    assert ("prompt_token_ids" in choice) is bool(more)
    chunks = client.chunks("/v1/completions", prompt=PROMPT, **body)
    named = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    assert [token for each in named if each for token in each["tokens"]] == expected


def test_every_chunk_counts_tokens(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.chunks("/v1/chat/completions", messages=MESSAGES, max_tokens=8, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
    assert chunks[-1]["usage"]["prompt_tokens"] > 0


def test_salt_shares_nothing_with_others(client: Client) -> None:
    prompt = PROMPT * 20
    client.complete(prompt)
    assert client.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    salted = client.complete(prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = client.complete(prompt, cache_salt="mine")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_empty_prompt_is_the_token_that_begins_every_text(client: Client) -> None:
    choice = client.choice("", max_tokens=2, return_token_ids=True)
    assert len(choice["prompt_token_ids"]) == 1
    assert choice["text"]


@pytest.mark.parametrize("max_tokens", [-1, 100_000])
def test_answer_without_a_limit_ends_with_the_context_and_says_so(
    system: System, client: Client, max_tokens: int
) -> None:
    context: int = system.client().models.list().data[0].model_dump()["max_model_len"]
    answer = client.complete([40] * (context - 6), max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 6
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "model_context_window_exceeded")


def test_text_with_a_budget_outgrows_the_context_and_says_what_was_forgotten(system: System, client: Client) -> None:
    context: int = system.client().models.list().data[0].model_dump()["max_model_len"]
    body = {"max_tokens": 40, "ignore_eos": True, "kv_budget": {"tokens": 128}}
    answer = client.complete([40] * (context - 6), **body)
    # Of the 2,081 tokens that were computed, 128 fit, and each eviction makes room for 16.
    assert (answer["usage"]["completion_tokens"], answer["usage"]["evicted_tokens"]) == (40, 1968)
    again = client.complete([40] * (context - 6), **body)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert "evicted_tokens" not in client.complete([40] * 60, **body)["usage"]
    refused = client.post("/v1/completions", prompt="x", kv_budget={"tokens": 63})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_budget")
    assert "must be 64 to 2048" in refused.json()["error"]["message"]


def test_chat_answer_begins_with_the_echoed_message(client: Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    body = {"messages": messages, "max_tokens": 4, "continue_final_message": True, "add_generation_prompt": False}
    plain = client.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    echoed = client.post("/v1/chat/completions", **body, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "def add(" + plain


def test_other_names_and_whole_floats_are_served(client: Client) -> None:
    assert client.choice(n_predict=5, max_tokens=None)["text"] == client.choice(max_tokens=5.0)["text"]
    assert client.choice(repeat_penalty=1.5)["text"] == client.choice(repetition_penalty=1.5)["text"]
    assert len(client.complete(n=2, best_of=2)["choices"]) == 2


def mean_logprob(choice: dict[str, Any]) -> float:
    shown: list[float] = choice["logprobs"]["token_logprobs"]
    return sum(shown) / len(shown)


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"guided_regex": "[a-z]{2,7}( [a-z]{2,7})?"}, {"echo": True, "stop": ["\n"]}],
    ids=["logprobs", "grammar", "echo"],
)
def test_best_answers_are_those_that_a_ranking_by_hand_finds(client: Client, fields: dict[str, Any]) -> None:
    drawn = {"prompt": [PROMPT, "class Node:"], "temperature": 1.0, "seed": 11, "max_tokens": 6, **fields}
    everything = client.complete(**{**drawn, "echo": False, "logprobs": 1, "n": 4})
    plain = client.complete(**drawn, n=4)["choices"]
    means = list(map(mean_logprob, everything["choices"]))
    places = [each for first in (0, 4) for each in sorted(range(first, first + 4), key=lambda at: -means[at])[:2]]
    told = client.complete(**drawn, n=2, best_of=4)
    assert told["choices"] == [plain[place] | {"index": index} for index, place in enumerate(places)]
    assert told["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]


def test_answers_of_one_model_have_one_fingerprint(client: Client) -> None:
    fingerprint = client.complete()["system_fingerprint"]
    assert fingerprint.startswith("fp_")
    chunks = client.chunks("/v1/chat/completions", messages=MESSAGES, max_tokens=2)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"suffix": "x"}, "suffix", "invalid_value"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids", "invalid_value"),
        ({"logprobs": 0, "logprob_token_ids": [2**30]}, "logprob_token_ids", "invalid_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_it(
    client: Client, body: dict[str, Any], param: str, code: str
) -> None:
    answer = client.post("/v1/completions", prompt=PROMPT, max_tokens=2, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"


def test_prompt_may_hold_every_character(client: Client) -> None:
    prompt = "x = " + "".join(map(chr, range(32))) + "\x7f\u0085\u2028"
    assert client.choice(prompt, echo=True, max_tokens=1)["text"].startswith(prompt)
