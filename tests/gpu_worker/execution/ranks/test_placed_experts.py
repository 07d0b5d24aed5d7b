"""Experts that move between ranks score as those that stay, over all forms of weights; ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gpu_worker.execution.ranks.runner import GroupRunner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.layers.ranks.division import Division, IndivisibleError
from kernels import cpu_library as library_module
from kernels.moe import layers as experts_module
from tests.gpu_worker.execution.ranks.test_divided_models import MODELS, TOKENS, load, logits
from tests.gpu_worker.execution.ranks.thread_ranks import ThreadRanks, on_ranks
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.quantization.test_mxfp4 import CASE, Case, save_packed

STEPS = (13, 14, 1, 1, 1)
MIXTURES: dict[str, Callable[[Path], object]] = {
    "mxfp4": lambda path: save_packed(path, Case("GptOss", {**CASE.options, "num_local_experts": 4})),
    **{
        name: make
        for name, make in MODELS.items()
        if any(part in name for part in ("moe", "mixtral", "deepseek", "flex-olmo", "mimo", "nemotron_h-experts"))
        and not name.endswith("-dense")
    },
}


def moving_logits(directory: Path, ranks: ThreadRanks, redundant: int) -> torch.Tensor:
    """Score a prompt, and move experts between its steps: those that were prepared meanwhile, or all at once."""
    ranks.num_redundant_experts = redundant
    model = load(directory, ranks)
    run, found = PagedRun(model, [TOKENS]), []
    assert model.placed_experts
    for number, count in enumerate(STEPS):
        wanted = [experts.places[number:] + experts.places[:number] for experts in model.placed_experts]
        prepared = [experts.prepare(places) for experts, places in zip(model.placed_experts, wanted, strict=True)]
        for experts, places, ready in zip(model.placed_experts, wanted, prepared, strict=True):
            if number % 2:
                experts.restore(places)
            else:
                experts.adopt(places, ready)
        found.append(run.step({0: count})[0])
    loads = model.expert_loads()
    assert loads is not None
    assert {int(layer.sum()) % len(TOKENS) for layer in loads.by_layer()} == {0}
    return torch.cat(found)


def check(name: str, redundant: int, directory: Path) -> None:
    MIXTURES[name](directory)
    found = on_ranks(2, lambda ranks: moving_logits(directory, ranks, redundant), has_whole_experts=True)
    whole = logits(directory)
    side_by_side = torch.cat(found, dim=1)[:, : whole.shape[1]]
    torch.testing.assert_close(side_by_side, whole, atol=1e-4 * float(whole.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "redundant"), [("mxfp4", 2), ("recurrent-qwen3_5_moe", 0), ("gguf-qwen3-moe", 4)])
def test_experts_that_move_score_as_those_of_one_process(name: str, redundant: int, tmp_path: Path) -> None:
    check(name, redundant, tmp_path)


def recovered_logits(directory: Path, ranks: ThreadRanks) -> torch.Tensor:
    """Score a prompt after moves that failed at rank 0 when all but one of a layer's experts were written."""
    ranks.num_redundant_experts = 2
    model = load(directory, ranks)
    own = Mock(spec=TorchModelRunner, model=model)
    runner = Mock(spec=GroupRunner, own=own)
    for experts in model.placed_experts:
        before = experts.places
        ready = dict(experts.prepare(before[1:] + before[:1]))
        assert len(ready) > 1
        if ranks.rank == 0:
            ready[max(ready)] = None
            with pytest.raises(TypeError):
                experts.adopt(before[1:] + before[:1], ready)
            assert experts.places == before
    GroupRunner._restart(runner)
    own.restart.assert_called_once_with()
    return PagedRun(model, [TOKENS]).step({0: len(TOKENS)})[0]


def test_move_that_fails_half_way_at_rank_0_changes_no_scores(tmp_path: Path) -> None:
    MIXTURES["mxfp4"](tmp_path)
    side_by_side = torch.cat(
        on_ranks(2, lambda ranks: recovered_logits(tmp_path, ranks), has_whole_experts=True), dim=1
    )
    whole = logits(tmp_path)
    atol = 1e-4 * float(whole.abs().max())
    torch.testing.assert_close(side_by_side[:, : whole.shape[1]], whole, atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_every_family_that_move_score_as_those_of_one_process(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.slow
def test_experts_that_are_linear_layers_move_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "cpu_library", lambda: None)
    assert library_module.cpu_library() is not None
    check("mxfp4", 2, tmp_path)


def test_more_replicas_than_ranks_could_use_are_refused() -> None:
    with pytest.raises(IndivisibleError, match="5 redundant experts are more than each rank needs to have all experts"):
        Division(0, 2, True, 5).expert_share(4, 8, 2)
    with pytest.raises(IndivisibleError, match="5 experts, 1 of them redundant, cannot be divided among 2 ranks"):
        Division(0, 2, True, 1).expert_share(4, 8, 2)
