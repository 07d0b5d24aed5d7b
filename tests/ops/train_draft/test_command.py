from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click import Abort
from click.testing import CliRunner

from ops.cli.train_draft import command
from shared.errors import ConfigError


def invoke(*arguments: str | Path) -> Any:
    options = ["--kind", "medusa", "--steps", "3", "--tokens", "512", "--window", "32", "--num-threads", "1"]
    return CliRunner().invoke(command, [*options, *map(str, arguments)], standalone_mode=False)


def test_draft_is_trained_from_several_texts_and_its_acceptance_told(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in texts:
        file.write_text((target / "text.txt").read_text())

    done = invoke("--target", target, "--out", out, *(part for file in texts for part in ("--text", file)))

    assert done.exception is None
    assert f"medusa draft written to {out}: 3 steps" in done.output
    assert "tokens accepted a draft" in done.output
    assert {"config.json", "model.safetensors"} <= {file.name for file in out.iterdir()}


def test_command_without_text_says_that_it_is_required(target: Path, tmp_path: Path) -> None:
    done = invoke("--target", target, "--out", tmp_path / "draft")

    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "--text: is required: text files like what the target will work on"
    with pytest.raises(FileNotFoundError):
        (tmp_path / "draft").stat()


def test_unreadable_held_out_text_is_named(target: Path, tmp_path: Path) -> None:
    text = target / "text.txt"
    done = invoke("--target", target, "--out", tmp_path / "draft", "--text", text, "--held-out", tmp_path / "none")

    assert str(done.exception) == f"--held-out: {tmp_path / 'none'} cannot be read: No such file or directory"


def test_interrupted_training_says_that_there_is_no_draft(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.train_draft.job.measure", interrupt)
    out = tmp_path / "draft"
    done = invoke("--target", target, "--out", out, "--text", target / "text.txt")

    assert isinstance(done.exception, (KeyboardInterrupt, Abort))
    assert f"interrupted; there is no draft in {out}" in done.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--minutes", "inf", "must be a finite number, not inf"),
        ("--tokens", "1" + "0" * 400, "is too large; the most allowed is 1000000000000"),
        ("--steps", "1" + "0" * 400, "is too large; the most allowed is 1000000000"),
        ("--num-layers", "1" + "0" * 400, "is too large; the most allowed is 1000"),
    ],
)
def test_numbers_without_measure_are_refused(target: Path, tmp_path: Path, option: str, value: str, limit: str) -> None:
    done = invoke("--target", target, "--out", tmp_path / "draft", "--text", target / "text.txt", option, value)

    assert isinstance(done.exception, ConfigError)
    assert done.exception.variable == "HEADRACE_" + option[2:].upper().replace("-", "_")
    assert done.exception.problem.endswith(limit)
