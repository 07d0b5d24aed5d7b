from __future__ import annotations

from tests.ops.cli.command import headrace


def test_help_says_what_each_kind_is_and_takes_text() -> None:
    done = headrace("train-draft", "--help")

    assert done.returncode == 0
    assert "--text FILE" in done.stdout
    assert "a smaller model, Medusa heads, or an EAGLE layer" in " ".join(done.stdout.split())
    assert "train-draft" in headrace("--help").stdout


def test_settings_that_are_missing_or_unknown_are_named() -> None:
    cases = {
        ("--kind", "lookahead"): "--kind: 'lookahead' is not one of model, medusa, eagle",
        ("--kind", "eagle"): "--target: is required; see headrace train-draft --help",
    }
    for arguments, message in cases.items():
        done = headrace("train-draft", *arguments)
        assert (done.returncode, done.stderr) == (2, f"headrace: {message}\n")
