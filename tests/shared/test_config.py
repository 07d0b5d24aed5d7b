from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.config import resolve, setting
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Settings:
    port: int = setting(8000, "Port.", minimum=0, maximum=65535)
    rate: float | None = setting(None, "Rate.", minimum=0)
    size: int | None = setting(None, "Size.", minimum=1 << 20)
    kind: str = setting("a", "Kind.", choices=("a", "b"))
    is_on: bool = setting(True, "On.")
    place: Path | None = setting(None, "Place.")
    items: list[str] = setting(list, "Made anew for each.")
    word: str | None = setting(None, "Word.", secret=True)


@dataclass(frozen=True, slots=True)
class _Sizes:
    number: int | None = setting(None, "Number.")
    form: str = setting("float32", "Form.", choices=("float16", "float32"), synonyms={"half": "float16"})


def test_defaults_hold_when_nothing_is_given() -> None:
    assert resolve(_Settings, {}, {"HEADRACE_PORT": "", "PORT": "1"}) == _Settings(
        8000, None, None, "a", True, None, [], None
    )


def test_values_win_over_the_environment_which_wins_over_defaults() -> None:
    environ = {"HEADRACE_PORT": "1", "HEADRACE_KIND": "b", "HEADRACE_IS_ON": "no", "HEADRACE_PLACE": "x"}
    settings = resolve(_Settings, {"port": 2, "kind": None}, environ)
    assert (settings.port, settings.kind, settings.is_on, settings.place) == (2, "b", False, Path("x"))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PORT", "x", "'x' is not a whole number"),
        ("PORT", "1.5", "not a whole number"),
        ("PORT", "-1", "too small; the least allowed is 0"),
        ("PORT", "70000", "too large; the most allowed is 65535"),
        ("RATE", "nan", "must be a finite number, not nan"),
        ("RATE", "1e999", "must be a finite number, not inf"),
        ("SIZE", "9", "9 is too small; the least allowed is 1048576"),
        ("KIND", "c", "'c' is not one of a, b"),
        ("IS_ON", "maybe", "use true or false"),
    ],
)
def test_unusable_value_names_the_variable_and_what_is_allowed(name: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        resolve(_Settings, {}, {f"HEADRACE_{name}": value})
    assert raised.value.variable == f"HEADRACE_{name}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("1M", 1 << 20),
        ("2GB", 2_000_000_000),
        ("2 GiB", 2 << 30),
        (" 4_096 ", 4096),
        ("1m", 1_000_000),
    ],
)
def test_whole_number_may_have_a_unit(text: str, value: int) -> None:
    assert resolve(_Sizes, {}, {"HEADRACE_NUMBER": text}).number == value


@pytest.mark.parametrize("text", ["1.5", "0.0001k", "4kb", "4x", "k", "4K4", "-4K"])
def test_unit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a whole number"):
        resolve(_Sizes, {}, {"HEADRACE_NUMBER": text})


def test_synonym_of_a_choice_is_that_choice() -> None:
    assert resolve(_Sizes, {"form": "half"}, {}).form == "float16"
    with pytest.raises(ConfigError, match="'double' is not one of float16, float32"):
        resolve(_Sizes, {"form": "double"}, {})


@pytest.mark.parametrize("value", [True, "1", "TRUE", "yes", "On"])
def test_boolean_is_read_in_its_usual_spellings(value: Any) -> None:
    assert resolve(_Settings, {"is_on": value}, {}).is_on is True


def test_secret_is_read_from_the_file_that_a_second_variable_names(tmp_path: Path) -> None:
    file = tmp_path / "word"
    file.write_text("hush\n")
    environ = {"HEADRACE_WORD_FILE": str(file), "HEADRACE_KIND_FILE": str(file)}
    assert resolve(_Settings, {}, environ).word == "hush"
    file.write_bytes(b"\xef\xbb\xbfhush\r\n")
    assert resolve(_Settings, {}, environ).word == "hush"
    # An empty variable is none; a value wins over the file; other settings have no file.
    assert resolve(_Settings, {}, {**environ, "HEADRACE_WORD": ""}).word == "hush"
    assert resolve(_Settings, {}, {**environ, "HEADRACE_WORD": "w"}).word == "w"
    assert resolve(_Settings, {}, environ).kind == "a"


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "No such file"), (b" \n", "is empty"), (b"\xff", "not text in UTF-8")]
)
def test_file_of_a_secret_that_cannot_be_used_names_its_variable(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "word"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as raised:
        resolve(_Settings, {}, {"HEADRACE_WORD_FILE": str(file)})
    assert raised.value.variable == "HEADRACE_WORD_FILE"
