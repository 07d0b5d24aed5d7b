"""Tuning with a timer that only knows what it is told, and results from the CPU."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.gpu_config import GpuGeneration
from ops.bench.gpu.case import OURS, Case, Clock, Entry, Op, Shapes, sizes
from ops.bench.gpu.cases import attention_batch, elementwise, logits, quantized_linear, rotation, small_gemm
from ops.bench.gpu.timer import Timing
from ops.bench.gpu.tune import attention, linear, row_ops
from ops.bench.gpu.tune.__main__ import main, tune_tables
from ops.bench.gpu.tune.choice import Tuning, choose
from ops.bench.gpu.tune.table_process import TableFile, tune
from ops.bench.gpu.tune.tables import ALL_TABLES, ROOT, TunedTable
from tests.ops.bench.gpu.step.tiny_models import CPU
from tests.ops.bench.gpu.step.tiny_models import QWEN as TINY

TINY_ATTENTION = attention_batch.AttentionShape.of(TINY)
PRESENT, SLOW, FAST, WRONG = ({"width": width} for width in (1, 2, 3, 4))
SECONDS = {1: (4e-6, 4e-6), 2: (9e-6, 3e-6), 3: (3e-6, 4e-6), 4: (1e-6, 1e-6)}
TABLE_SOURCE = '''"""Widths."""

WIDTHS: dict[str, dict[int, dict[str, int]]] = {
    "HOPPER": {
        64: {"width": 1},
        128: {"width": 1},
    },
    "ADA": {
        64: {"width": 7},
    },
}
PREFERRED: dict[str, dict[tuple[int, int], int]] = {}
MEASURED: dict[str, str] = {}
'''


class ToldTimer:
    """Takes what the call returns for its time."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        seconds = call(num_sets - 1)
        return Timing(seconds if isinstance(seconds, float) else 1.0, 0.0, is_graphed=True)


def error(device: torch.device, *shape: object, entry: Entry) -> float:
    return 0.5 if entry == WRONG else 0.0


def make_case(device: torch.device, place: int) -> Case:
    return Case(0, 0, 3, {OURS: lambda _, entry: SECONDS[entry["width"]][place]})


OP = Op(error, make_case, 0.1)


def make_tuning(key: int | None = 64, candidates: tuple[Entry, ...] = (SLOW, FAST, WRONG), op: Op = OP) -> Tuning:
    return Tuning("WIDTHS", key, candidates, op, {"small": ()}, {f"problem {place}": (place,) for place in range(2)})


def test_fastest_right_entry_is_chosen_and_a_wrong_one_never() -> None:
    choice = choose(make_tuning(), PRESENT, CPU, ToldTimer())
    assert choice.entry == FAST
    failures = {trial.entry["width"]: trial.failure for trial in choice.trials}
    assert failures == {1: None, 2: None, 3: None, 4: "wrong at small: 5.00e-01 of 1e-01"}


@pytest.mark.parametrize("wrong", [float("nan"), None], ids=["nan", "raises"])
def test_entry_without_a_right_result_is_out(wrong: float | None) -> None:
    def error(device: torch.device, entry: Entry) -> float:
        if entry == FAST and wrong is None:
            raise RuntimeError("out of resource: shared memory")
        return wrong if entry == FAST and wrong is not None else 0.0

    tuning = make_tuning(candidates=(SLOW, FAST), op=replace(OP, error=error))
    choice = choose(tuning, PRESENT, CPU, ToldTimer())
    assert choice.entry == PRESENT
    assert choice.trials[2].failure is not None


def test_entry_that_fails_at_a_timed_shape_is_out() -> None:
    def case(device: torch.device, place: int) -> Case:
        def call(index: int, entry: Entry) -> float:
            if entry == FAST and place == 1:
                raise RuntimeError("too large")
            return SECONDS[entry["width"]][0]

        return Case(0, 0, 1, {OURS: call})

    choice = choose(make_tuning(op=replace(OP, case=case)), PRESENT, CPU, ToldTimer())
    assert choice.entry == PRESENT
    assert (choice.trials[2].failure or "").startswith("problem 1: RuntimeError: too large (call:")


def test_present_entry_stays_where_another_is_hardly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, 3, (3.98e-6, 3.98e-6))
    assert choose(make_tuning(candidates=(FAST,)), PRESENT, CPU, ToldTimer()).entry == PRESENT


def test_no_right_entry_at_all_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"WIDTHS\[64\]: no entry is right; the present one: wrong at small"):
        choose(make_tuning(candidates=()), WRONG, CPU, ToldTimer())


def run_tune(
    tmp_path: Path,
    *tunings: Tuning,
    limit_s: float = 60.0,
    derive: object = None,
    generation: GpuGeneration = GpuGeneration.HOPPER,
) -> tuple[bool, TableFile]:
    path = Path("kernels/widths/launch_table.py")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(TABLE_SOURCE)
    table = TunedTable("widths", path, tunings, derive)
    deadline = time.monotonic() + limit_s
    status = tune(table, CPU, generation, ToldTimer(), tmp_path, "a GPU", deadline)
    return status, TableFile.read(tmp_path / path)


def test_chosen_entry_is_written_and_the_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, file = run_tune(tmp_path, make_tuning(128))
    assert status
    assert file.tables == {
        "WIDTHS": {"HOPPER": {64: PRESENT, 128: FAST}, "ADA": {64: {"width": 7}}},
        "PREFERRED": {},
        "MEASURED": {"WIDTHS[128] HOPPER": "a GPU"},
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  chosen    1.155  width=3: 3.0 4.0"
    assert lines[2].startswith("  present   1.333  width=1")
    assert lines[4] == "              inf  width=4: wrong at small: 5.00e-01 of 1e-01"


def test_generation_without_entries_begins_with_those_it_took(tmp_path: Path) -> None:
    _, file = run_tune(tmp_path, make_tuning(128), generation=GpuGeneration.BLACKWELL)
    assert file.tables["WIDTHS"] == {
        "HOPPER": {64: PRESENT, 128: PRESENT},
        "ADA": {64: {"width": 7}},
        "BLACKWELL": {64: PRESENT, 128: FAST},
    }


def test_derived_tables_follow_from_the_chosen_entries(tmp_path: Path) -> None:
    def derive(device: torch.device, timer: object, entries: dict[int, Entry]) -> dict[str, object]:
        assert entries == {64: FAST, 128: PRESENT}
        return {"PREFERRED": {(6144, 4096): 16}}

    _, file = run_tune(tmp_path, make_tuning(64), derive=derive)
    assert file.tables["PREFERRED"] == {"HOPPER": {(6144, 4096): 16}}


def test_entries_stay_when_nothing_is_right_or_time_is_up(tmp_path: Path) -> None:
    wrong = replace(OP, error=lambda device, entry: 1.0)
    status, file = run_tune(tmp_path / "wrong", make_tuning(64, op=wrong))
    assert (status, file.text()) == (False, TABLE_SOURCE)
    status, file = run_tune(tmp_path / "late", make_tuning(64), limit_s=-1.0)
    assert (status, file.text()) == (False, TABLE_SOURCE)


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.name)
def test_table_files_are_literals_that_come_back_as_they_were(table: TunedTable) -> None:
    source = (ROOT / table.path).read_text()
    assert TableFile(source).text() == source


def test_rewritten_file_is_valid_and_formatted(tmp_path: Path) -> None:
    for place, path in enumerate({table.path for table in ALL_TABLES}):
        file = TableFile.read(ROOT / path)
        file.tables["MEASURED"] = {f"{path} {number}": "NVIDIA H200, torch 2.11, 2026-11-22" for number in range(3)}
        if "PREFERRED" in file.tables:
            file.tables["PREFERRED"] = {"HOPPER": {(6144, 4096): 16, (4096, 14_336): 64}}
        (tmp_path / f"table_{place}.py").write_text(file.text())
        ast.parse(file.text())
        assert TableFile(file.text()).tables == file.tables
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts"))
    if ruff is not None:
        config = ["--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([ruff, "format", "--diff", *config, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_attention_candidates_are_all_different_code() -> None:
    """An even number of stages compiles to the code of the odd one below it (`test_compile` looks at the code)."""
    for tuning in (*attention.SPLIT_ATTENTION, *attention.SPLIT_ATTENTION_8BIT, *attention.CHUNK_ATTENTION):
        assert len({tuple(entry.items()) for entry in tuning.candidates}) == len(tuning.candidates)
        stages = {entry["num_stages"] for entry in tuning.candidates}
        assert stages <= {2, 3, 5, 7}
        # Two tiles in flight at the tile of the table.
        table_tile = 8192 // (tuning.key or 0)
        assert any(entry["num_stages"] == 5 and entry["block_n"] == table_tile for entry in tuning.candidates)


def test_table_file_with_code_in_it_is_refused() -> None:
    with pytest.raises(ValueError, match="line 3 is not `name: type = literal`: print"):
        TableFile('"""Doc."""\n\nprint(1)\n')


def small(tuning: Tuning, checked: Shapes, timed: Shapes) -> Tuning:
    """Return a tuning of two candidates at other shapes."""
    return replace(tuning, candidates=tuning.candidates[:2], checked=checked, timed=timed)


def small_product(tuning: Tuning, size: int) -> Tuning:
    return small(tuning, sizes((16, 40, size), (3, 13, 128)), {"qkv": (16, 40, size)})


def small_attention(tuning: Tuning, lengths: list[tuple[int, int]]) -> Tuning:
    dtypes = [shape[2] for shape in tuning.checked.values()]
    checked = {str(dtype): (TINY_ATTENTION, lengths, dtype) for dtype in dtypes}
    return small(tuning, checked, {"some": (TINY_ATTENTION, lengths)})


REAL_TUNINGS: dict[str, Tuning] = {
    "split": small_attention(attention.SPLIT_ATTENTION[0], [(1, 40), (1, 3)]),
    "split_8bit": small_attention(attention.SPLIT_ATTENTION_8BIT[0], [(1, 40), (1, 3)]),
    "chunk": small_attention(attention.CHUNK_ATTENTION[0], [(9, 20)]),
    "small_gemm": small_product(linear.SMALL_GEMM[0], 70),
    "int4": small_product(linear.PACKED_LINEAR[0], 256),
    "fp8": small_product(linear.SCALED_LINEAR[0], 128),
    "rms_norm": small(row_ops.RMS_NORM, sizes((3, 40), (1, 7)), sizes((3, 40))),
    "silu_mul": small(row_ops.SILU_MUL, sizes((3, 40), (1, 7)), sizes((3, 40))),
    "rope_kv_write": small(row_ops.ROPE_KV_WRITE, {"tiny": (TINY, 5)}, {"tiny": (TINY, 5)}),
    "sampling": small(
        row_ops.SAMPLING,
        {name: (3, 300, *shape[2:]) for name, shape in row_ops.SAMPLING.checked.items()},
        {name: (3, 300, *shape[2:]) for name, shape in row_ops.SAMPLING.timed.items()},
    ),
}


@pytest.mark.parametrize("name", REAL_TUNINGS)
def test_checks_and_problems_of_each_op_run(name: str) -> None:
    tuning = REAL_TUNINGS[name]
    choice = choose(tuning, {**tuning.candidates[0]}, CPU, ToldTimer())
    assert [trial.failure for trial in choice.trials] == [None] * len(choice.trials)
    assert len(choice.trials[0].seconds) == len(tuning.timed)


def test_entry_with_a_wrong_result_is_seen_by_the_checks_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    product = quantized_linear.form_linear_reference
    monkeypatch.setattr(logits, "sample_tokens", lambda logits, *_, **__: logits.argmin(dim=-1))
    monkeypatch.setattr(small_gemm, "small_gemm", lambda inputs, weight, _: inputs @ weight.T * 1.1)
    monkeypatch.setattr(attention_batch, "paged_attention", lambda query, *_, **__: query * 0.5)
    monkeypatch.setattr(quantized_linear, "form_linear_reference", lambda x, matrix: product(x, matrix) * 1.1)
    monkeypatch.setattr(elementwise, "rms_norm", lambda x, weight, eps, residual: x * weight)
    monkeypatch.setattr(elementwise, "gated", lambda gate_up, activation: gate_up.chunk(2, dim=-1)[0])
    monkeypatch.setattr(rotation, "rope_kv_write", lambda qkv, *_: qkv[:, : TINY.num_heads])
    for tuning in REAL_TUNINGS.values():
        with pytest.raises(RuntimeError, match="no entry is right; the present one: wrong at"):
            choose(tuning, tuning.candidates[0], CPU, ToldTimer())


def test_product_is_preferred_up_to_the_rows_at_which_it_stays_ahead() -> None:
    class RowsTimer(ToldTimer):
        """Ours, timed first, is ahead up to 4 rows, and behind at 8."""

        def __init__(self) -> None:
            self.is_ours = False

        def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
            self.is_ours = not self.is_ours
            rows = len(call(0))
            return Timing({True: 0.9, False: 1.0}[self.is_ours and rows <= 4], 0.0, is_graphed=True)

    entries = {16: linear.SMALL_GEMM[0].candidates[0]}
    preferred = linear.preferred_products(CPU, RowsTimer(), entries, [(40, 70), (40, 70)], rows=(1, 4, 8, 16))
    assert preferred == {(40, 70): 4}
    assert linear.preferred_products(CPU, ToldTimer(), entries, [(40, 70)], rows=(1,)) == {}


def test_quantized_kernel_is_ahead_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class RowsTimer(ToldTimer):
        def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
            rows, is_ours = call(0)
            return Timing(0.9 if is_ours and rows <= 64 else 1.0, 0.0, is_graphed=True)

    served: list[tuple[int, int]] = []

    def ours(x: torch.Tensor, matrix: object, entry: Entry, max_rows: int) -> tuple[int, bool]:
        served.append((len(x), max_rows))
        assert entry == {"width": max_rows}
        return len(x), True

    monkeypatch.setattr(linear, "multiply", ours)
    entries = {limit: {"width": limit} for limit in (16, 64, 128)}
    for timer, last in ((RowsTimer(), 64), (ToldTimer(), 0)):
        ahead = linear.quantized_ahead_until(
            CPU, timer, entries, quantized_linear.int4_weight, lambda x, matrix: (len(x), False), (40, 128),
            (8, 64, 256),
        )  # fmt: skip
        assert ahead == last
    assert served[:3] == [(8, 16), (64, 64), (256, 128)]


def test_candidates_fit_the_configurations_that_they_are_for() -> None:
    for table in ALL_TABLES:
        file = TableFile.read(ROOT / table.path)
        for tuning in table.tunings:
            entries = file.tables[tuning.table]["HOPPER"]
            present = entries if tuning.key is None else entries[tuning.key]
            assert len(tuning.candidates) <= 30
            for candidate in tuning.candidates:
                assert candidate.keys() == present.keys(), tuning.label
            for check in tuning.op.checks(CPU, tuning.checked, entry=present):
                inspect.signature(check.error).bind()
            for spec in tuning.op.cases(tuning.timed):
                inspect.signature(spec.case).bind(CPU, *spec.arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "sampling"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_table_whose_process_dies_leaves_the_files_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not tune_tables(["sampling"], tmp_path, limit_s=60.0)
    assert "sampling: its process ended with exit code 1; its other entries stay as they are" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
