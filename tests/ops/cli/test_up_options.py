import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli.up import command
from ops.stack import run as run_module
from ops.stack.config import UpConfig
from shared.errors import ConfigError


def test_options_of_the_parts_reach_them_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []

    def run(config: Any, environ: Any, more_models: Any) -> int:
        seen.append((config, environ))
        return 0

    monkeypatch.setattr(run_module, "run", run)
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "8")
    arguments = ["--workers", "2", "--speculative", "ngram", "--no-enable-prefix-caching", "--max-streams", "7"]
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert result.exception is None
    [(config, environ)] = seen
    assert config.workers == 2
    assert environ["HEADRACE_SPECULATIVE"] == "ngram"
    assert environ["HEADRACE_ENABLE_PREFIX_CACHING"] == "False"
    assert (environ["HEADRACE_MAX_STREAMS"], environ["HEADRACE_BLOCK_SIZE"]) == ("7", "8")
    assert "HEADRACE_WORKERS" not in environ


def test_help_fits_a_terminal_and_shows_what_people_set_first() -> None:
    shown, every = (CliRunner().invoke(command, [flag], terminal_width=80).output for flag in ("--help", "--help-all"))
    assert [line for line in (shown + every).splitlines() if len(line) > 80] == []
    first, all_ = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) for text in (shown, every))
    assert first < all_
    # Thirty settings, and the two options of help.
    assert len(first) == 32
    assert {"--model", "--port", "--max-model-len", "--help-all"} <= first
    assert f"--help-all shows {len(all_) - len(first)} options more." in shown
    assert {option.opts[0] for option in command.params} <= all_


def test_model_given_twice_is_served_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run_module, "run", lambda *arguments: seen.append(arguments) or 0)
    for arguments in (["--model", "a", "--model", "b"], []):
        assert CliRunner().invoke(command, arguments, standalone_mode=False).exception is None
    assert [(str(config.model), more) for config, _, more in seen] == [("a", (Path("b"),)), ("None", ())]


@pytest.mark.parametrize(
    ("names", "environ", "problem"),
    [
        (("x/m", "y/m"), {}, "HEADRACE_MODEL: two of the models would be served as 'm'; rename a folder"),
        (("x/a b",), {}, "HEADRACE_SERVED_MODEL_NAME: name 'a b' must not contain white space, or characters that"),
        (("x/m", "y/n"), {"HEADRACE_SERVED_MODEL_NAME": "z"}, "HEADRACE_SERVED_MODEL_NAME: is the name of one model"),
    ],
)
def test_models_that_clients_could_not_tell_apart_are_refused(
    tmp_path: Path, names: tuple[str, ...], environ: dict[str, str], problem: str
) -> None:
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    first, *others = (tmp_path / name for name in names)
    with pytest.raises(ConfigError, match=problem):
        run_module.run(UpConfig(model=first, state_dir=tmp_path), environ, others)
