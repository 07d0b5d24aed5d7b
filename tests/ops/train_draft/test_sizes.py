from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from ops.train_draft.job import KINDS, check_job, train_draft
from shared.errors import ConfigError
from tests.ops.train_draft.conftest import JobMaker, ignore


@pytest.mark.parametrize(
    ("kind", "shape", "problem"),
    [
        ("model", {"hidden_size": 65536}, "HEADRACE_HIDDEN_SIZE: training .* set a smaller one, or fewer HEADRACE_NUM"),
        ("medusa", {}, "HEADRACE_MEDUSA_NUM_HEADS: training .* set fewer, or HEADRACE_MEDUSA_SHARED_HEAD"),
        ("eagle", {}, "HEADRACE_KIND: training .* train another kind, or free some memory"),
    ],
)
def test_draft_that_the_memory_cannot_train_is_refused_before_preparation(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, kind: str, shape: dict[str, int], problem: str
) -> None:
    monkeypatch.setattr("ops.train_draft.sizes.free_host_bytes", lambda: 100_000)

    with pytest.raises(ConfigError, match=f"^{problem}"):
        check_job(job(kind, **shape))


@pytest.mark.parametrize("kind", KINDS)
def test_disk_is_measured_before_preparation_by_what_is_written(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    one = job(kind)
    train_draft(one, ignore)
    written = sum(tensor.nbytes for tensor in load_file(one.out / "model.safetensors").values())
    shutil.rmtree(one.out)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=written))
    check_job(one)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=written - 1))
    with pytest.raises(ConfigError, match=r"^HEADRACE_OUT: .* free; the draft needs"):
        check_job(one)
