"""Settings of speculation that cannot work, told before or while weights are loaded; and those that can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.speculative.draft_files import eagle_config

DEMO_MODEL = Path("ops/demo_model/model")


def build(**settings: Any) -> Engine:
    directory = read_model_directory(DEMO_MODEL)
    config = WorkerConfig(model=DEMO_MODEL, device="cpu", num_threads=1, num_blocks=600, max_num_seqs=8, **settings)
    return build_engine(config, directory, ModelTokenizer(directory)).engine


def generate(engine: Engine) -> list[int]:
    prompt = ModelTokenizer(read_model_directory(DEMO_MODEL)).encode_text("one two three four. one two three four. one")
    sequence = Sequence("s", list(prompt), len(prompt), Sampling(temperature=0.0), 60)
    engine.add(sequence)
    while engine.has_work():
        engine.step()
    assert engine.last_error is None
    return sequence.token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    engine = build()
    tokens = generate(engine)
    assert engine.stats.spec_decode_num_drafts == 0
    return tokens


def test_engine_with_a_draft_model_says_how_many_drafts_it_accepted(plain: list[int]) -> None:
    engine = build(speculative="draft", draft_model=DEMO_MODEL, num_speculative_tokens=3)
    # The first steps measure, and an exploration comes at the latest after a few dozen.
    assert generate(engine) == generate(engine) == plain
    stats = engine.stats
    assert 0 < stats.spec_decode_num_drafts <= stats.spec_decode_num_draft_tokens
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


def test_engine_with_ngrams_gives_the_same_answer(plain: list[int]) -> None:
    assert generate(build(speculative="ngram")) == plain


def test_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DEMO_MODEL, draft)
    tokenizer = msgspec.json.decode((draft / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    with pytest.raises(ConfigError, match=r"HEADRACE_DRAFT_MODEL: .* has another vocabulary than the model"):
        build(speculative="draft", draft_model=draft)


@pytest.mark.parametrize(
    ("speculative", "name", "problem"),
    [
        ("draft", "eagle", r"eagle holds an EAGLE layer.* but HEADRACE_SPECULATIVE is draft; set that to eagle"),
        ("eagle", "another", r"config\.json: field 'hidden_size' is 64, but must be 256; take weights"),
        ("eagle", "nowhere", r"nowhere is not a directory of a model; give that of an EAGLE layer"),
        ("ngram", "eagle", r"is set, but HEADRACE_SPECULATIVE is ngram; set it to eagle or draft"),
        ("eagle", None, r"is needed with HEADRACE_SPECULATIVE=eagle: the directory of an EAGLE layer"),
    ],
)
def test_draft_model_that_does_not_fit_is_refused(
    drafts: Path, speculative: str, name: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"HEADRACE_DRAFT_MODEL: .*{problem}"):
        build(speculative=speculative, draft_model=None if name is None else drafts / name)


def test_plain_model_in_place_of_a_layer_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="holds a smaller model, but HEADRACE_SPECULATIVE is eagle; set that to draft"
    ):
        build(speculative="eagle", draft_model=DEMO_MODEL)


def test_damaged_weights_are_refused(drafts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(256, 4096)))
    whole = (drafts / "eagle" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match=r"HEADRACE_DRAFT_MODEL: .*is not a whole safetensors file"):
        build(speculative="eagle", draft_model=tmp_path)
