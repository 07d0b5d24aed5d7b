from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli.up import command
from ops.stack import run as run_module
from shared.errors import ConfigError


def test_options_of_the_parts_reach_them_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []

    def run(config: Any, environ: Any) -> int:
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


def test_addresses_and_counts_that_up_chooses_are_no_options_of_it() -> None:
    result = CliRunner().invoke(command, ["--host", "0.0.0.0"], standalone_mode=False)
    assert "No such option" in str(result.exception)
    assert not isinstance(result.exception, ConfigError)
