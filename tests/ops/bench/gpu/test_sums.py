"""The command that times sums between GPUs runs on CPUs, and reports missing GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu_library import cpu_library
from ops.bench.gpu import sums
from ops.bench.gpu.case import OURS

# In a process of its own, because ranks are forked from it.
MEASURE = """
import sys
from pathlib import Path
from ops.bench import record
from ops.bench.gpu.sums import main
record._RESULTS = Path(sys.argv[1])
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_sums_of_each_size_are_timed_once_they_are_right(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--num-ranks", "2", "--hidden-size", "64", "--rows", "1", "3")
    subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), *options], check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    names = [OURS] if cpu_library() is None else [OURS, "gloo"]
    assert [(row["rows"], row["bytes"], row["sum"]) for row in rows] == [
        (count, count * 128, name) for count in (1, 3) for name in names
    ]
    assert all(row["microseconds"] > 0 for row in rows)


def test_sum_that_is_wrong_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match=r"a sum of \(1, 4\) numbers is not 3"):
        sums._checked(lambda x: x, torch.ones(1, 4), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be enough GPUs")
def test_too_few_gpus_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert sums.main(["--num-ranks", "8"]) == 2
    assert "8 ranks take a GPU each, and torch finds 0" in capsys.readouterr().err
