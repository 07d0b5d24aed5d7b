"""Every op against its oracle in bf16, on the device, at the shapes that the bench checks."""

from __future__ import annotations

import pytest
import torch

from ops.bench.gpu.case import OpSuite
from ops.bench.gpu.results import check_lines
from ops.bench.gpu.run import check_op
from ops.bench.gpu.suites import all_suites


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("suite", all_suites(), ids=lambda suite: suite.name)
def test_op_equals_its_oracle(suite: OpSuite) -> None:
    results = check_op(suite, torch.device("cuda", 0))
    assert results
    assert all(result.is_right for result in results), "\n".join(check_lines(results))
