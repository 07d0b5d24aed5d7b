"""The commands of METHOD.md can be typed as they stand there, and none runs longer than nine minutes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import ops.bench.gpu
from ops.bench.gpu import __main__ as gpu_bench
from ops.cli.group import headrace

PAGE = (Path(ops.bench.gpu.__file__).parent / "METHOD.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if re.match(r"(PYTHON|timeout|python3|headrace)", line)]
NINE_MINUTES_S = 540


def arguments_of(command: str, after: str) -> list[str]:
    return shlex.split(command.partition(after)[2])


@pytest.mark.parametrize("command", [command for command in COMMANDS if "ops.bench" in command])
def test_command_knows_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = re.search(r"python3 -m (\S+)", command)
    assert module is not None
    name = module[1]
    spec = find_spec(name)
    is_room = spec is not None and spec.submodule_search_locations is not None
    main = import_module(f"{name}.__main__" if is_room else name).main
    with pytest.raises(SystemExit):
        main([*arguments_of(command, name), "--no-such-option"])
    assert "error: unrecognized arguments: --no-such-option\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command in COMMANDS if "-m ops.bench.gpu --" in command])
def test_suites_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main([*arguments_of(command, "ops.bench.gpu"), "--dry-run"]) == 2
    assert "--dry-run was given" in capsys.readouterr().err


def test_matrix_vector_products_of_8b_are_the_first_that_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [command for command in COMMANDS if "dense_linear" in command]
    gpu_bench.main([*arguments_of(command, "ops.bench.gpu"), "--dry-run"])
    cases = capsys.readouterr().out.partition(": ")[2].split(", ")
    assert [case.rpartition(" ")[0].split()[-1] for case in cases[:5]] == ["qkv", "output", "gate_up", "down", "head"]
    assert all(case.startswith("Llama-3-8B ") and " 1x" in case for case in cases[:5])


def test_perplexity_knows_its_options() -> None:
    [command] = [command for command in COMMANDS if "headrace perplexity" in command]
    arguments = [word.replace("$cache", "fp8") for word in arguments_of(command, "headrace ")]
    with pytest.raises(click.NoSuchOption) as ended:
        headrace.main([*arguments, "--no-such-option"], standalone_mode=False)
    assert ended.value.option_name == "--no-such-option"


def test_no_command_runs_longer_than_nine_minutes() -> None:
    for command in COMMANDS:
        seconds = re.search(r"timeout (\d+) ", command)
        if seconds is None:
            # It has limits of its own.
            assert re.search(r"ops\.bench\.gpu( |$)|ops\.bench\.gpu\.tune|ops\.demo_model", command), command
        else:
            # Three caches, one after the other.
            times = 3 if "perplexity" in command else 1
            assert times * int(seconds[1]) <= NINE_MINUTES_S, command
