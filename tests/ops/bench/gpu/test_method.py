"""The commands of METHOD.md can be typed as they stand there, on a bare machine, and none takes over nine minutes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import ops.bench.gpu
from ops.bench.gpu import __main__ as gpu_bench
from ops.bench.gpu.run import GRACE_S
from ops.cli.group import headrace
from tests.ops.bench.bare_machine import all_modules_but, python_without, run_without

PAGE = (Path(ops.bench.gpu.__file__).parent / "METHOD.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if re.match(r"(PYTHON|timeout|python3|headrace)", line)]
NINE_MINUTES_S = 540
# One device for a quarter of an hour, and what a bare machine takes before a call.
QUARTER_HOUR_S, MACHINE_START_S = 900, 90
ROOT = Path(__file__).parents[4]
BENCHES = [command for command in COMMANDS if "-m ops.bench" in command]
PERPLEXITIES = [command for command in COMMANDS if "-m ops.cli perplexity" in command]
[PYTEST] = [command for command in COMMANDS if "-m pytest" in command]
[WHEELS] = [command for command in COMMANDS if "find_spec" in command]
[TEST_OPTIONS] = [line for line in LINES if line.startswith("options=")]
# All that METHOD.md does not ask for.
ABSENT = all_modules_but(re.findall(r'"(torch .*?)"', WHEELS)[0].split())
FOLDERS = ("tests/gpu_worker/execution", "tests/kernels")
_PARSE_ALL = """
import contextlib, io
from importlib import import_module
for name, arguments in {calls!r}:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            import_module(name).main([*arguments, "--no-such-option"])
    except SystemExit:
        pass
    assert "unrecognized arguments: --no-such-option" in said.getvalue(), (name, arguments, said.getvalue())
"""


def bench_call(command: str) -> tuple[str, list[str]]:
    """Return the module with the `main` of a bench, and its arguments."""
    module = re.search(r"python3 -m (\S+)", command)
    assert module is not None
    spec = find_spec(module[1])
    is_room = spec is not None and spec.submodule_search_locations is not None
    return f"{module[1]}.__main__" if is_room else module[1], arguments_of(command, module[1])


def arguments_of(command: str, after: str) -> list[str]:
    return shlex.split(command.partition(after)[2].replace("$graphs", "decode"))


@pytest.mark.parametrize("command", BENCHES)
def test_command_knows_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = bench_call(command)
    with pytest.raises(SystemExit):
        import_module(name).main([*arguments, "--no-such-option"])
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


def limit_of(command: str) -> float:
    """Return the seconds after which a command of the first quarter of an hour has ended."""
    limit = re.search(r"timeout (\d+) |--limit-s (\d+) ", command)
    assert limit is not None, command
    return int(limit[1]) if limit[1] else int(limit[2]) + GRACE_S


def test_two_calls_and_starts_of_a_machine_fit_into_a_quarter_of_an_hour() -> None:
    first, second = (
        sum(limit_of(command) for command in COMMANDS if command in block.splitlines()) for block in BLOCKS[1:3]
    )
    assert 0 < second < first <= NINE_MINUTES_S
    assert first + second + 2 * MACHINE_START_S <= QUARTER_HOUR_S
    assert "dense_linear" in next(line for line in BLOCKS[1].splitlines() if "-m ops" in line)
    assert max(map(len, BLOCKS[1:3])) < 2000, "of what a call may say"


@pytest.mark.parametrize("command", PERPLEXITIES)
def test_perplexity_knows_its_options(command: str) -> None:
    arguments = [word.replace("$cache", "fp8") for word in arguments_of(command, "ops.cli ")]
    with pytest.raises(click.NoSuchOption) as ended:
        headrace.main([*arguments, "--no-such-option"], standalone_mode=False)
    assert ended.value.option_name == "--no-such-option"


def test_benches_need_nothing_that_a_bare_machine_lacks() -> None:
    done = run_without((*ABSENT, "click", "jinja2"), _PARSE_ALL.format(calls=[bench_call(one) for one in BENCHES]))
    assert done.returncode == 0, done.stderr


def test_perplexity_needs_nothing_that_a_bare_machine_lacks(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("def parse(text):\n    return text\n")
    command = next(each for each in PERPLEXITIES if "--device cpu" in each)
    arguments = arguments_of(command, "ops.cli ")
    arguments[arguments.index("--text") + 1] = str(text)
    code = f"from ops.cli import main\nsys.argv = ['headrace', *{arguments!r}]\nmain()"
    done = run_without(ABSENT, code)
    assert done.stdout.lstrip().startswith("perplexity "), done.stderr


def test_missing_wheels_are_named() -> None:
    program = shlex.split(WHEELS)[2]
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    program = program.replace("torch ", "torch not_there ").replace("g++", "no-cc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "not_there, no-cc\n")


def test_files_that_need_hypothesis_have_no_test_of_a_gpu() -> None:
    left_out = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"\bhypothesis\b", path.read_text())
    ]
    assert left_out
    assert not [path for path in left_out if re.search(r"mark\.gpu|DEVICES", path.read_text())]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param("tests/kernels/test_rms_norm_triton.py tests/gpu_worker/execution/test_submit.py", id="two"),
        pytest.param(None, marks=pytest.mark.slow, id="all"),
    ],
)
def test_tests_are_collected_on_a_bare_machine(files: str | None, tmp_path: Path) -> None:
    """First in one process, which names them, and then in those that share them out."""
    environment = python_without(ABSENT, tmp_path)
    # Plugins that are installed here are not there.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    listing = PYTEST[PYTEST.index("$(") : PYTEST.index(")") + 1]
    command = PYTEST if files is None else PYTEST.replace(listing, files)
    shared_out = command.replace("-P 12", "-P 2").replace("pytest $options", "pytest $options --collect-only")
    program = f"set -o pipefail\n{TEST_OPTIONS}\n{shared_out}"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(count) for count in re.findall(r"^(\d+)(?:/\d+)? tests? collected", done.stdout, re.MULTILINE)]
    assert sum(counts) > (0 if files else 500), done.stdout
    # No process has more than it may take, and all of them run at once.
    assert len(counts) <= 12
    assert max(counts) <= 50


def test_no_command_runs_longer_than_nine_minutes() -> None:
    for command in COMMANDS:
        seconds = re.search(r"timeout (?:-k 20 -s INT )?(\d+) ", command)
        if seconds is None:
            # It has limits of its own.
            assert re.search(r"ops\.bench\.gpu( |$)|ops\.bench\.gpu\.tune|ops\.demo_model|find_spec", command), command
        else:
            # Three caches, or two kinds of graphs, one after the other.
            times = 3 if "$cache" in command else 2 if "$graphs" in command else 1
            assert times * int(seconds[1]) <= NINE_MINUTES_S, command
