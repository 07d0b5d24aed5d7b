"""A training run, shortened to seconds on a corpus of a few functions."""

import json
from pathlib import Path

import pytest

from ops.demo_model import card, train
from ops.demo_model.architecture import LlamaShape
from ops.demo_model.train import Trainer, TrainingOptions, learning_rate_scale

DOCUMENTS = [f'def add_{i}(a, b):\n    """Add {i}."""\n    return a + b + {i}\n' for i in range(100)]
SMALL = LlamaShape(hidden_size=64, intermediate_size=96, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "training_documents", lambda: iter(DOCUMENTS))
    monkeypatch.setattr(train, "held_out_documents", lambda: DOCUMENTS[:2])


@pytest.mark.parametrize(
    ("fraction", "scale"), [(0.0, 0.0), (0.005, 0.5), (0.2, 1.0), (0.7, 0.5), (1.0, 0.0), (1.1, 0)]
)
def test_learning_rate_warms_up_holds_and_falls_to_zero(fraction: float, scale: float) -> None:
    assert learning_rate_scale(fraction) == pytest.approx(scale)


def test_run_without_time_exports_a_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "SAMPLE_TOKENS", 4)

    Trainer(TrainingOptions(minutes=0.0, folder=tmp_path, shape=SMALL)).run()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["is_final"] is True
    assert training["held_out"]["loss_per_token"] > 4.0
    assert str(training["held_out"]["bits_per_byte"]) in (tmp_path / "README.md").read_text()


def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    trainer = Trainer(TrainingOptions(tokens_per_step=256, folder=tmp_path, shape=SMALL))

    losses = []
    for _ in range(6):
        trainer._step(fraction=0.2)
        losses.append(trainer.optimization.mean_loss)

    assert losses[-1] < losses[0]
    assert trainer.optimization.num_steps == 6
