"""Text that the model was not trained on."""

import subprocess
import sys
from pathlib import Path

import pytest

from ops.demo_model.corpus import HELD_OUT_MODULES, held_out_documents, main
from tests.architecture.source import ROOT


def test_every_held_out_module_exists() -> None:
    assert len(held_out_documents()) == len(HELD_OUT_MODULES)


@pytest.mark.parametrize(
    ("arguments", "printed"), [((), "\n".join(HELD_OUT_MODULES) + "\n"), (("--text",), "".join(held_out_documents()))]
)
def test_command_lists_the_modules_or_prints_their_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], printed: str
) -> None:
    monkeypatch.setattr("sys.argv", ["corpus", *arguments])
    main()
    assert capsys.readouterr().out == printed


def test_modules_that_an_interpreter_lacks_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "heapq.py").write_text("x = 1\n")

    assert held_out_documents(tmp_path) == ["x = 1\n"]


def test_text_is_read_as_utf_8_whatever_the_locale() -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    command += ["-m", "ops.demo_model.corpus", "--text"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
