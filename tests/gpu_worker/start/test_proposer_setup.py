"""Settings of speculation that cannot work, told before or while weights are loaded; and those that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.speculative.draft_files import eagle_config, eagle_tensors, save_draft

DEMO_MODEL = Path("ops/demo_model/model")
SIZE, VOCAB = 256, 4096


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random EAGLE layers, one of them for the demo model."""
    directory = tmp_path_factory.mktemp("drafts")
    torch.manual_seed(1)
    save_draft(directory / "eagle", eagle_config(SIZE, VOCAB), eagle_tensors(SIZE))
    save_draft(directory / "eagle-of-another", eagle_config(64, VOCAB), eagle_tensors(64))
    return directory


def generate(max_tokens: int = 24, **settings: Any) -> tuple[list[int], int]:
    """Return an answer, and how many draft tokens were verified on the way."""
    directory = read_model_directory(DEMO_MODEL)
    config = WorkerConfig(model=DEMO_MODEL, device="cpu", num_threads=1, num_blocks=600, max_num_seqs=8, **settings)
    tokenizer = ModelTokenizer(directory)
    engine = build_engine(config, directory, tokenizer).engine
    prompt = tokenizer.encode_text("def main():\n    one, two = three(")
    sequence = Sequence("s", list(prompt), len(prompt), Sampling(temperature=0.0, ignore_eos=True), max_tokens)
    engine.add(sequence)
    while engine.has_work():
        engine.step()
    assert engine.last_error is None
    return sequence.token_ids[len(prompt) :], sequence.num_drafted_tokens


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return generate()[0]


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_answers_stay_the_same_whatever_drafts(
    plain: list[int], drafts: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The policy would soon find that random weights do not draft well.
    monkeypatch.setattr("gpu_worker.start.engine_setup.AdaptiveDepth", lambda depth, **_: FixedDepth(depth))
    tokens, num_drafted = generate(speculative=kind, draft_model=DEMO_MODEL if kind == "draft" else drafts / kind)
    assert tokens == plain
    assert num_drafted > 0


@pytest.mark.parametrize(
    ("speculative", "name", "problem"),
    [
        ("draft", "eagle", r"eagle holds an EAGLE layer.* but HEADRACE_SPECULATIVE is draft; set that to eagle"),
        ("eagle", "eagle-of-another", r"config\.json: field 'hidden_size' is 64, but must be 256; take weights"),
        ("eagle", "nowhere", r"nowhere is not a directory of a model; give that of an EAGLE layer"),
        ("ngram", "eagle", r"is set, but HEADRACE_SPECULATIVE is ngram; set it to eagle or draft"),
        ("eagle", None, r"is needed with HEADRACE_SPECULATIVE=eagle: the directory of an EAGLE layer"),
    ],
)
def test_draft_model_that_does_not_fit_is_refused(
    drafts: Path, speculative: str, name: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"HEADRACE_DRAFT_MODEL: .*{problem}"):
        generate(speculative=speculative, draft_model=None if name is None else drafts / name)


def test_plain_model_in_place_of_a_layer_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="holds a smaller model, but HEADRACE_SPECULATIVE is eagle; set that to draft"
    ):
        generate(speculative="eagle", draft_model=DEMO_MODEL)


def test_damaged_weights_are_refused(drafts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle_config(SIZE, VOCAB)))
    whole = (drafts / "eagle" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match=r"HEADRACE_DRAFT_MODEL: .*is not a whole safetensors file"):
        generate(speculative="eagle", draft_model=tmp_path)
