"""What `headrace doctor` says of the store of files."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.doctor.finding import Level
from ops.doctor.settings import file_findings


def test_store_that_works_is_named_and_one_that_is_nearly_full_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_findings(None, tmp_path) == []
    (found,) = file_findings(str(tmp_path / "files"), tmp_path)
    assert (found.level, found.text.startswith(f"the directory {tmp_path}/files can be written")) == (Level.FINE, True)
    assert file_findings(None, tmp_path) == [found]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    assert [(each.level, "5 MB free" in each.text) for each in file_findings(None, tmp_path)][1:] == [
        (Level.WARNING, True)
    ]


@pytest.mark.parametrize("files", ["gs://bucket", "s3://", "file/below"])
def test_store_that_cannot_be_used_is_a_problem(tmp_path: Path, files: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    place = files if "://" in files else str(tmp_path / files)
    (found,) = file_findings(place, tmp_path)
    assert found.level is Level.PROBLEM
    assert found.remedy
