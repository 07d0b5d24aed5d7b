import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ops.stack.state import ReadyFile, StateDirectory, has_died, holder_of, read_ready_file, write_ready_file
from shared.errors import ConfigError

READINESS = ReadyFile(
    "http://h", "key", "nats://n", "nats://a@n", None, "http://m", "operator", {"gateway": [1], "worker": [2, 3]}
)


def test_keys_are_kept_and_private(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    key = state.key("api_key")
    assert state.key("api_key") == key != state.key("operator_key")
    assert key.startswith("hr-")
    assert len(key) > 30
    assert stat.S_IMODE((tmp_path / "state" / "api_key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    state.close()


@pytest.mark.parametrize("name", ["api_key", "operator_key", "responses_secret"])
@pytest.mark.parametrize("damaged", [b"hr-T", b"\xff\xfe" * 20], ids=["cut", "bytes"])
def test_damaged_key_of_a_state_directory_names_its_file_and_the_way_out(
    tmp_path: Path, name: str, damaged: bytes
) -> None:
    (tmp_path / name).write_bytes(damaged)
    state = StateDirectory(tmp_path)
    with pytest.raises(ConfigError, match=rf"^HEADRACE_STATE_DIR: .*/{name} has no whole key.* delete it"):
        state.key(name)
    (tmp_path / name).unlink()
    assert state.key(name).startswith("hr-")
    state.close()


def test_second_user_of_a_state_directory_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    first = StateDirectory(tmp_path)
    assert holder_of(tmp_path) == os.getpid()
    with pytest.raises(ConfigError, match="is in use by another `headrace up`"):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_system_has_died_when_neither_its_lock_nor_a_process_is_left(tmp_path: Path) -> None:
    gone = 2**22 + 1
    ready = replace(READINESS, pids={"nats": [gone]})
    assert not has_died(tmp_path, ready)
    (tmp_path / "lock").write_text(str(os.getpid()))
    assert not has_died(tmp_path, ready)
    (tmp_path / "lock").write_text(str(gone))
    assert has_died(tmp_path, ready)
    # Parts that were left behind can still be talked to.
    assert not has_died(tmp_path, replace(ready, pids={"nats": [os.getpid()]}))
    state = StateDirectory(tmp_path)
    (tmp_path / "lock").write_text(str(gone))
    assert not has_died(tmp_path, ready)
    state.close()


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/state"])
def test_state_directory_that_is_a_file_is_told_as_that(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"HEADRACE_STATE_DIR: {path} cannot be used: .* is a file; name a folder"):
        StateDirectory(Path(path))


@pytest.fixture
def closed_directory(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not ours to use; root becomes somebody else meanwhile."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield tmp_path / "closed"
    if is_root:
        os.seteuid(0)
    (tmp_path / "closed").chmod(0o700)


def test_state_directory_of_another_user_says_whose_it_is(closed_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"Permission denied: .* belongs to \S+, and this is \S+"):
        StateDirectory(closed_directory / "state")


def test_ready_file_is_read_back_and_private(tmp_path: Path) -> None:
    write_ready_file(tmp_path / "ready.json", READINESS)
    assert read_ready_file(tmp_path) == READINESS
    assert stat.S_IMODE((tmp_path / "ready.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_no_ready_file_means_nothing_runs(tmp_path: Path) -> None:
    assert read_ready_file(tmp_path) is None


def test_private_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from ops.stack.state import write_private; "
    code += "write_private(Path(sys.argv[1]), 'Gr\\xf6\\xdfe')"
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], env={**os.environ, **locale}, check=True)
    assert (tmp_path / "file").read_text("utf-8") == "Größe"
