"""Commands that read a model take its id at the hub; without a network that is one line that names the option."""

from __future__ import annotations

from pathlib import Path

from tests.ops.cli.command import headrace


def test_id_that_cannot_be_fetched_names_the_option(tmp_path: Path) -> None:
    done = headrace("bench", "engine", "--model", "org/tiny", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "headrace: --model: org/tiny is not a folder here, and could not be downloaded" in done.stderr
