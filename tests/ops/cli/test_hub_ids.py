"""Commands that read a model take its id at the hub; without a network that is one line that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.cli.command import headrace


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["bench", "engine", "--model"], "--model"),
        (
            ["train-draft", "--kind", "medusa", "--out", "out", "--steps", "1", "--text", "text.txt", "--target"],
            "--target",
        ),
    ],
    ids=["bench", "train-draft"],
)
def test_id_that_cannot_be_fetched_names_the_option(arguments: list[str], option: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 1000)
    done = headrace(*arguments, "org/tiny", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"headrace: {option}: org/tiny is no folder here, and could not be downloaded" in done.stderr
