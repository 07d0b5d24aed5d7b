from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.dependent_launch import dependent_launch
from tests.kernels.compile_checks import compile_launches

KERNELS = Path(__file__).parents[2] / "kernels"
# `matrix_state` launches the kernels of all rules.
PASSED_ON = {"kernel": ("gated_delta_kernel", "ssd_kernel")}


def functions() -> dict[str, ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def kernels_launched_early() -> Iterator[str]:
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                options = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                if any(option.startswith("dependent_launch(") for option in options):
                    name = ast.unparse(node.func.value)
                    yield from PASSED_ON.get(name, (name,))


def test_kernels_that_begin_early_wait_before_anything_else() -> None:
    names, defined = set(kernels_launched_early()), functions()
    assert {
        *("rms_norm_kernel", "gated_kernel", "quantize_tokens_kernel", "packed_linear_kernel", "scaled_linear_kernel"),
        *("rope_kv_write_kernel", "split_attention_kernel", "reduce_splits_kernel", "route_kernel", "sort_kernel"),
        *("combine_kernel", "causal_conv_kernel", "gated_delta_kernel", "ssd_kernel"),
    } <= names
    for name in names:
        first = next(node for node in defined[name].body if not isinstance(node.value, ast.Constant))
        assert ast.unparse(first) == "wait_for_inputs()", name


def test_kernels_wait_in_the_code_before_they_touch_memory(tmp_path: Path) -> None:
    for kernel in compile_launches("tests.kernels.elementwise_launches", (80, 90), tmp_path / "compiled"):
        waits = kernel.ptx.find("griddepcontrol.wait")
        assert (waits > 0) == (kernel.capability == 90), kernel
        if waits > 0:
            assert kernel.count(r"griddepcontrol\.launch_dependents") == 1, kernel
            assert kernel.first(r"(ld|st|atom|red)\.global|cp\.async") > waits, kernel


@pytest.mark.parametrize(("capability", "options"), [((8, 9), {}), ((9, 0), {"launch_pdl": True})])
def test_option_is_given_where_the_gpu_has_it(
    capability: tuple[int, int], options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dependent_launch.__wrapped__(torch.device("cuda", 0)) == options
    assert dependent_launch(torch.device("cpu")) == {}
