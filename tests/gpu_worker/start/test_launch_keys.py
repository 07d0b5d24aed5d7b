"""Nothing is compiled while a worker with a GPU serves: all specialisation keys have been used when it is ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Of every model, whatever its weights and its proposer.
KERNELS = {
    "chunk_attention_kernel",
    "count_tokens_kernel",
    "draw_kernel",
    "penalties_kernel",
    "reduce_chunk_splits_kernel",
    "reduce_splits_kernel",
    "rms_norm_kernel",
    "rope_kv_write_kernel",
    "gated_kernel",
    "split_attention_kernel",
    "threshold_kernel",
    "tile_masses_kernel",
    "tile_statistics_kernel",
}
_MIXTURE = {"combine_kernel", "dense_experts_kernel", "route_kernel", "sort_kernel"}
_EXPANDED = ("expanded", "expanded-eager", "expanded-decode")
_ROUNDING = "quantize_tokens_kernel"
_FP8_MIXTURE = _MIXTURE - {"dense_experts_kernel"} | {"packed_experts_kernel", "scaled_experts_kernel", _ROUNDING}
_HYBRID = {"causal_conv_kernel", "gated_delta_kernel", "invert_chunks_kernel"}
FURTHER = {
    "int4": {"packed_linear_kernel"},
    "int8": {_ROUNDING, "scaled_linear_kernel"},
    "fp8-blocks": {_ROUNDING, "scaled_linear_kernel"},
    "mixture": _MIXTURE,
    **dict.fromkeys(("mixture-eager", "mixture-decode", "latent", *_EXPANDED), _MIXTURE),
    **dict.fromkeys(("fp8-mixture", "fp8-mixture-eager"), _FP8_MIXTURE),
    **dict.fromkeys(("hybrid", "hybrid-eager", "hybrid-decode"), _HYBRID),
}
# A mixture has its activation in its products.
WITHOUT = {kind: {"gated_kernel"} for kind in FURTHER if "mixture" in kind}
CASES = ["off", "eager", "int8-cache", "ngram", "draft", "eagle", "eagle3"]
CASES += ["int4", "int8", "fp8-blocks"]
CASES += ["mixture", "mixture-eager", "mixture-decode", "fp8-mixture", "fp8-mixture-eager"]
CASES += ["hybrid", "hybrid-eager", "hybrid-decode", "latent", *_EXPANDED, "dense-decode"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_serving_launches_nothing_that_the_start_has_not_compiled(case: str, drafts: Path, tmp_path: Path) -> None:
    """With batches of all sizes, all kinds of sampling, chunks of many lengths, and drafts as trees and chains."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = tmp_path / "keys.json"
    command = [sys.executable, "-m", "tests.gpu_worker.start.launch_keys", case, str(drafts), str(output)]

    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert finished.returncode == 0, finished.stderr
    found = json.loads(output.read_text())
    assert set(found["kernels"]) == (KERNELS | FURTHER.get(case, set())) - WITHOUT.get(case, set())
    assert found["new"] == []
    # Of many lengths, or of the one that is captured.
    expected = {"expanded": 1, "expanded-eager": 6, "expanded-decode": 6}
    assert min(found["num_expanded"], 6) == expected.get(case, 0)
