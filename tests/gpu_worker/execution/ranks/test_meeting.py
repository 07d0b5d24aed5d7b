"""Ranks of one host meet on loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpu_worker.execution.ranks.meeting import ProcessGroupRanks


def test_ranks_listen_on_loopback_alone_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    ranks = ProcessGroupRanks(0, 1, torch.device("cpu"))
    ranks.join(str(tmp_path / "store"))
    try:
        assert ranks.gather(torch.ones(2, 3)).tolist() == torch.ones(2, 3).tolist()
        assert os.environ.pop("NCCL_SOCKET_IFNAME") in ("lo", "lo0")
    finally:
        ranks.leave()
