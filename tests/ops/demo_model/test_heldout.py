"""The held-out modules as a list and as a command."""

from pathlib import Path

import pytest

from ops.demo_model.corpus import HELD_OUT_MODULES, held_out_documents, main


def test_command_lists_the_modules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["heldout"])

    main()

    assert capsys.readouterr().out.split() == list(HELD_OUT_MODULES)


def test_command_prints_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["heldout", "--text"])

    main()

    assert capsys.readouterr().out == "".join(held_out_documents())


def test_modules_that_an_interpreter_lacks_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "heapq.py").write_text("x = 1\n")

    assert held_out_documents(tmp_path) == ["x = 1\n"]
