"""What is sent: texts of the right length and with the beginnings in common that were asked for."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

import pytest
from PIL import Image

from ops.load_generator.run import Load
from ops.load_generator.sessions import TokenScale, from_file, picture, single_requests
from ops.simulation.workload import Arrival, Synthetic, TraceError

PLAIN = TokenScale()


def texts(seed: int, scale: TokenScale = PLAIN, **options: int) -> list[list[str]]:
    arrivals = Synthetic(30, 10.0, 100, 5, **options).arrivals(seed)
    return [session.turns[0].text.split() for session in single_requests(arrivals, scale, [], seed)]


def test_prompts_share_their_beginning_and_nothing_else() -> None:
    shared = texts(1, shared_prefix=40)
    assert {len(words) for words in shared} == {100}
    assert len({tuple(words[:40]) for words in shared}) == 1
    assert len({tuple(words[40:44]) for words in shared}) == 30
    assert len({tuple(words[:4]) for words in texts(1)}) == 30


def test_seed_says_which_prompts_are_sent() -> None:
    assert texts(1) == texts(1)
    assert not {tuple(words[:4]) for words in texts(1)} & {tuple(words[:4]) for words in texts(2)}


def test_prompt_has_as_many_words_as_the_server_makes_tokens_of() -> None:
    scale = TokenScale.measured((16, 42), (144, 298))
    assert (scale.per_word, scale.overhead) == (2.0, 10.0)
    assert {len(words) for words in texts(1, scale)} == {45}


def test_prompts_of_a_file_are_sent_with_the_length_of_their_answers(tmp_path: Path) -> None:
    arrivals = [Arrival(float(number), 1, 7) for number in range(3)]
    path = tmp_path / "prompts"
    said = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x" * 40}]
    path.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    assert [session.turns[0].max_tokens for session in from_file(path, arrivals)] == [10, 10, 10]
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n')
    turns = [session.turns[0] for session in from_file(path, arrivals)]
    assert [(turn.text, turn.max_tokens) for turn in turns] == [("a", 3), ("b", 7), ("a", 3)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no prompts"),
        ("{", "is no JSON"),
        ('{"text": 1}', "entry 1: has neither `prompt` nor `conversations`"),
        ('{"prompt": 1}', "entry 1: prompt must be a text"),
        ('{"prompt": "a"}\n{"prompt": "a", "output_tokens": 0}', "entry 2: output_tokens must be 1 to"),
    ],
)
def test_file_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(TraceError, match=told):
        from_file(path, [Arrival(0.0, 1, 1)])


def test_picture_is_a_png_of_its_size() -> None:
    url = picture(7, 5, random.Random(1))
    with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", (7, 5))


FIELDS = {
    **{"dataset_name": "agents", "dataset_path": None, "requests": 3, "request_rate": None, "burstiness": 1.0},
    **{"max_concurrency": None, "random_input_len": 20, "random_output_len": 4, "random_prefix_len": 8},
    **{"prefixes": 2, "spread": 0.0, "turns": 2, "images": 0, "image_size": (8, 8), "answer_timeout_s": 9.0},
}


@pytest.mark.parametrize("name", ["sharegpt", "custom"])
def test_conversations_of_a_file_are_those_that_are_sent(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a b"}]}])
    )
    load = Load(**FIELDS | {"dataset_name": name, "dataset_path": path}, seed=1)  # type: ignore[arg-type]
    assert {turn.text for session in load.sessions(TokenScale(1.0, 0)) for turn in session.turns} == {"hi"}


def test_agents_follow_from_the_seed_alone() -> None:
    drawn = [Load(**FIELDS, seed=seed).sessions(TokenScale(1.0, 0)) for seed in (1, 1, 2)]  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
