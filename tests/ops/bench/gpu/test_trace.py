from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.gpu import trace
from ops.bench.gpu.trace import Span, StepTrace, summarise
from tests.ops.bench.gpu.step.tiny_models import LLAMA


def test_kernels_are_added_up_and_gaps_are_where_none_runs() -> None:
    spans = [Span("a", 0, 10), Span("b", 12, 15), Span("a", 14, 20), Span("a", 25, 35)]
    assert summarise(spans, 1) == StepTrace({"a": (3, 26), "b": (1, 3)}, busy_us=28, gaps_us=7)
    assert summarise(spans, 2).kernels["a"] == (1.5, 13)


def test_kernel_within_another_takes_no_time_of_its_own() -> None:
    assert summarise([Span("a", 0, 10), Span("b", 2, 6), Span("a", 10, 11)], 1).busy_us == 11


def test_traced_step_is_printed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(trace, "STEPS", {"tiny": (LLAMA, 2, "fp8")})
    assert trace.main(["--device", "cpu", "--step", "tiny", "--context", "20", "--replays", "2"]) == 0
    [row] = [json.loads(line) for line in (tmp_path / "gpu_trace.jsonl").read_text().splitlines()]
    assert (row["step"], row["layers"], row["device"]) == ("tiny", 2, "cpu")
    assert row["kernels"]
    assert row["busy_us"] > 0
    assert capsys.readouterr().out.startswith("tiny: ")


def test_without_a_gpu_nothing_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    if trace.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert trace.main(["--step", "8b_1"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
