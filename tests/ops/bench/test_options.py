"""Every bench has a `--help`, and refuses unknown options before it measures anything."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import ops.bench
from ops.bench.record import add_list, bench_parser, writable

FOLDER = Path(ops.bench.__file__).parent
DOCUMENTED = sorted(
    {
        command
        for page in (FOLDER / "README.md", FOLDER / "gpu" / "METHOD.md", FOLDER.parents[1] / "Makefile")
        for command in re.findall(
            r"python3? -m ops\.bench\.([\w.]*\w)", page.read_text().partition("## Where we stand")[0]
        )
    }
)


@pytest.mark.parametrize("command", DOCUMENTED)
def test_command_explains_itself_and_refuses_what_it_does_not_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"ops.bench.{command}"
    is_room = bool(spec := find_spec(name)) and spec.submodule_search_locations is not None
    module = import_module(f"{name}.__main__" if is_room else name)
    main = module.main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert f"python -m {name}" in shown
    asked = {each.replace("_", "-") for each in re.findall(r"\boptions\.([a-z]\w*)\b(?!\()", inspect.getsource(module))}
    assert asked <= set(re.findall(r"(?:--|^  )([a-z][a-z0-9-]*)", shown, re.MULTILINE))
    with pytest.raises(SystemExit) as ended:
        main(["--no-such-option"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


def test_all_commands_are_found() -> None:
    assert {"gateway", "engine_compare", "spec", "gpu", "gpu.tune"} <= set(DOCUMENTED)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [([], [1, 4]), (["--batch", "2"], [2]), (["--batch", "2,3"], [2, 3]), (["--batch", "2", "3,5"], [2, 3, 5])],
)
def test_values_are_separated_by_commas_or_spaces(arguments: list[str], values: list[int]) -> None:
    parser = bench_parser("any", None)
    add_list(parser, "--batch", int, [1, 4], "sequences at once")
    assert parser.parse_args(arguments).batch == values


@pytest.mark.parametrize(
    ("read", "allowed", "text", "problem"),
    [
        (str, ["1b", "8b"], "8b,9b", "'9b' is none of 1b, 8b"),
        (str, ["1b", "8b"], "1b,", "'' is none of 1b, 8b"),
        (int, [], "1,x", "argument --values: invalid literal for int() with base 10: 'x'"),
    ],
)
def test_value_that_cannot_be_taken_is_told(
    read: Callable[[str], object], allowed: list[str], text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = bench_parser("any", None)
    add_list(parser, "--values", read, None, "values", allowed)
    with pytest.raises(SystemExit):
        parser.parse_args(["--values", text])
    assert problem in capsys.readouterr().err


def test_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for name in ("there", "new"):
        assert writable(str(tmp_path / name)) == tmp_path / name
    for name in ("", "nowhere/new"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            writable(str(tmp_path / name))
