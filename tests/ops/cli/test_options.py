from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ops.cli.group import headrace
from ops.cli.options import settings_command
from shared.config import setting
from shared.errors import ConfigError
from tests.ops.cli.command import headrace as run_headrace


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Settings of every kind."""

    count: int = setting(3, "How many.", minimum=1, maximum=9)
    directory: Path | None = setting(None, "Where.")
    verbose: bool = setting(False, "Say more.")
    mode: str = setting("fast", "Which way.", choices=("fast", "slow"))
    model_name: str | None = setting(None, "Which one.", alias="--model")
    secret_word: str = setting("hush", "Do not show it.", secret=True)


def _invoke(*arguments: str, **environ: str) -> Any:
    """Return the settings that the command got, or the error it raised."""
    seen: list[Any] = []

    def run(config: SampleConfig, word: str | None) -> int:
        """Do it."""
        seen.append((config, word))
        return 0

    command = settings_command(SampleConfig, "sample", run, [click.Argument(["word"], required=False)])
    result = CliRunner().invoke(command, arguments, env=environ, standalone_mode=False)
    if "--help" in arguments:
        return result.output
    return seen[0] if seen else result.exception


def test_options_win_over_variables_which_win_over_defaults() -> None:
    config, word = _invoke("--count", "5", "hello", HEADRACE_COUNT="7", HEADRACE_MODE="slow")
    assert config == SampleConfig(count=5, mode="slow")
    assert word == "hello"


def test_flags_and_paths_are_converted() -> None:
    config, word = _invoke("--verbose", "--directory", "a/b")
    assert (config.verbose, config.directory, word) == (True, Path("a/b"), None)
    assert _invoke("--no-verbose", HEADRACE_VERBOSE="true")[0].verbose is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "ten"], "--count: 'ten' is not a whole number"),
        (["--count", "10"], "--count: 10 is too large; the most allowed is 9"),
        (["--mode", "medium"], "--mode: 'medium' is not one of fast, slow"),
    ],
)
def test_bad_values_name_the_option_and_what_is_allowed(arguments: list[str], message: str) -> None:
    error = _invoke(*arguments)
    assert isinstance(error, ConfigError)
    assert str(error) == message


def test_bad_value_of_a_variable_names_the_variable() -> None:
    assert str(_invoke(HEADRACE_COUNT="ten")) == "HEADRACE_COUNT: 'ten' is not a whole number"
    assert str(_invoke("--count", "11", HEADRACE_COUNT="ten")).startswith("--count: 11 is too large")


def test_variable_that_nothing_reads_is_refused() -> None:
    assert str(_invoke(HEADRACE_COUNTS="5")).startswith("HEADRACE_COUNTS: there is no such setting")
    # A variable is named even where errors name options.
    assert str(_invoke(HEADRACE_MODEL_NAM="m")).endswith("did you mean HEADRACE_MODEL_NAME?")


def test_secret_may_come_from_a_file_and_no_other_setting(tmp_path: Path) -> None:
    (tmp_path / "word").write_text("psst\n")
    assert _invoke(HEADRACE_SECRET_WORD_FILE=str(tmp_path / "word"))[0].secret_word == "psst"
    assert str(_invoke(HEADRACE_MODE_FILE="x")).startswith("HEADRACE_MODE_FILE: there is no such setting")
    # Those of other commands are known too: an environment is one for all of them.
    assert _invoke(HEADRACE_OPERATOR_KEY_FILE="x")[0] == SampleConfig()


def test_second_name_of_an_option_is_the_same_setting() -> None:
    assert _invoke("--model", "m")[0] == _invoke("--model-name", "m")[0] == SampleConfig(model_name="m")
    assert _invoke(HEADRACE_MODEL_NAME="m")[0].model_name == "m"
    assert "--model-name, --model TEXT Which one." in " ".join(_invoke("--help").split())


def test_help_of_every_command_names_variables_in_one_form() -> None:
    ctx = click.Context(headrace)
    groups = {name: headrace.get_command(ctx, name) for name in headrace.list_commands(ctx)}
    inner = [each for one in groups.values() if isinstance(one, click.Group) for each in one.commands.values()]
    shown = {each.name: " ".join(each.get_help(click.Context(each)).split()) for each in [*groups.values(), *inner]}
    assert [name for name, text in shown.items() if "env var" in text] == []
    assert "if not. [HEADRACE_CHECK]" in shown["worker"]
    assert "Required. [HEADRACE_TEXT]" in shown["perplexity"]
    assert "[HEADRACE_TENANT; default default]" in shown["create"]
    assert "[HEADRACE_MAX_CONCURRENT; at least 1]" in shown["create"]


def test_format_of_the_kv_cache_has_one_name_in_all_commands() -> None:
    ctx = click.Context(headrace)
    bench = headrace.get_command(ctx, "bench")
    assert isinstance(bench, click.Group)
    for command in (
        headrace.get_command(ctx, "worker"),
        headrace.get_command(ctx, "perplexity"),
        bench.commands["engine"],
    ):
        assert command is not None
        names = {name for option in command.params for name in option.opts if "kv" in name and "type" in name}
        assert names == {"--kv-cache-dtype"}


def test_help_tells_variable_default_and_bounds_but_no_secret() -> None:
    text = " ".join(_invoke("--help").split())
    assert "--count N How many. [HEADRACE_COUNT; default 3; 1 to 9]" in text
    assert "--mode fast|slow Which way. [HEADRACE_MODE; default fast]" in text
    assert "--verbose / --no-verbose Say more. [HEADRACE_VERBOSE; default False]" in text
    assert "HEADRACE_SECRET_WORD" in text
    assert "hush" not in text


def test_list_of_commands_says_what_each_does_in_a_whole_sentence() -> None:
    listed = CliRunner().invoke(headrace, ["--help"], terminal_width=80).output.partition("Commands:")[2]
    assert [line for line in listed.splitlines() if "..." in line] == []


def test_id_that_cannot_be_fetched_names_the_option(tmp_path: Path) -> None:
    done = run_headrace(
        "bench", "engine", "--model", "org/tiny", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "headrace: --model: org/tiny is not a folder here, and could not be downloaded" in done.stderr
