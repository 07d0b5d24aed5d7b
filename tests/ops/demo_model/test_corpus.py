"""What the model was trained on, and what it was not."""

from pathlib import Path

import pytest

from ops.demo_model.corpus import (
    HELD_OUT_MODULES,
    MAX_CODEC_BYTES,
    held_out_documents,
    main,
    standard_library,
    training_files,
)


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return training_files()


def test_held_out_modules_are_not_in_the_training_files(files: list[Path]) -> None:
    held_out = {standard_library() / name for name in HELD_OUT_MODULES}

    assert held_out.isdisjoint(files)


def test_held_out_modules_exist_and_are_two_to_three_percent_of_the_text(files: list[Path]) -> None:
    held_out = sum(map(len, held_out_documents()))
    total = held_out + sum(path.stat().st_size for path in files)

    assert len(held_out_documents()) == len(HELD_OUT_MODULES)
    assert 0.02 < held_out / total < 0.03


def test_tests_and_installed_packages_are_left_out(files: list[Path]) -> None:
    folders = {part for path in files for part in path.relative_to(standard_library()).parts[:-1]}

    assert folders.isdisjoint({"test", "tests", "idle_test", "site-packages", "pydoc_data"})
    assert {"asyncio", "json", "email"} <= folders


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_files_of_a_library_are_sorted_and_filtered(tmp_path: Path) -> None:
    write(tmp_path / "zlib_like.py", "b = 2\n")
    write(tmp_path / "asyncio/base.py", "a = 1\n")
    write(tmp_path / "heapq.py", "held = 'out'\n")
    write(tmp_path / "json/tests/test_a.py", "assert True\n")
    write(tmp_path / "_sysconfigdata__linux.py", "build_time_vars = {}\n")
    write(tmp_path / "encodings/small.py", "x = 1\n")
    write(tmp_path / "encodings/table.py", "#" * (MAX_CODEC_BYTES + 1))

    names = [path.relative_to(tmp_path).as_posix() for path in training_files(tmp_path)]

    assert names == ["asyncio/base.py", "encodings/small.py", "zlib_like.py"]


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
    write(tmp_path / "heapq.py", "x = 1\n")

    assert held_out_documents(tmp_path) == ["x = 1\n"]
