"""Adapters beside models that are divided among ranks: what each row scores, and answers before and after a death."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from gpu_worker.adapters.reader import PackedAdapter, read_packed
from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.ranks import process as process_module
from gpu_worker.execution.ranks.beside import BesideSteps, encoded_pieces
from gpu_worker.execution.ranks.messages import COMMANDS, AdapterPiece, Done, PackAdapter, PlaceAdapter
from gpu_worker.execution.ranks.replies import RankProblemError
from gpu_worker.execution.ranks.runner import GroupRunner
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from gpu_worker.speculative.ngram.proposer import NgramProposer
from kernels.low_rank import LowRank, LowRankPart
from shared.errors import HeadraceError
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, write_adapter
from tests.gpu_worker.adapters.test_merged import AdaptedRun
from tests.gpu_worker.core.sequences import limit
from tests.gpu_worker.execution.engine_run import random_prompt, save_tiny_model
from tests.gpu_worker.execution.ranks import full_member
from tests.gpu_worker.execution.ranks.group_run import Run, started
from tests.gpu_worker.execution.ranks.test_divided_models import FORMS, MODELS, TOKENS, load
from tests.gpu_worker.execution.ranks.test_group import assert_same, replace_rank
from tests.gpu_worker.execution.ranks.thread_ranks import on_ranks, sharing_memory
from tests.gpu_worker.models.families.random_models import Case
from tests.gpu_worker.quantization.checkpoints import make_checkpoint
from tests.gpu_worker.quantization.test_mxfp4 import CASE as GPT_OSS
from tests.gpu_worker.quantization.test_mxfp4 import save_packed

SLOT, RANK = 1, 3


def _random_adapter(targets: AdapterTargets) -> dict[str, LowRank]:
    """Return an adapter beside each matrix, whose modules have parts of their own, and some of them two."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name, matrix in targets.matrices.items():
        parts, first = [], 0
        for rows in matrix.rows:
            down = torch.randn(RANK, matrix.columns, generator=generator) * matrix.columns**-0.5
            up = torch.randn(rows, RANK, generator=generator) * 0.2
            parts.append(LowRankPart(down, up, 0.5, torch.arange(first, first + rows)))
            first += rows
        found[name] = LowRank((*parts, parts[0]), matrix.shape, matrix.is_gated)
    return found


def _scores(directory: Path, adapter: Mapping[str, LowRank], ranks: Ranks = ALONE) -> list[torch.Tensor]:
    """Score a sequence with an adapter and one without, in chunks and then token by token."""
    model = load(directory, ranks, num_adapters=2)
    done: SimpleQueue[Done] = SimpleQueue()
    beside = BesideSteps(model, done.put)
    for piece in encoded_pieces(adapter):
        command = COMMANDS.decode(piece[4:])
        assert isinstance(command, AdapterPiece)
        beside.do(command)
    for task in (PackAdapter(1, max(low_rank.rank for low_rank in adapter.values())), PlaceAdapter(1, SLOT)):
        beside.do(task)
        assert done.get(timeout=60) == Done(1, None)
    run = AdaptedRun(model, [TOKENS, TOKENS])
    run.slots = {0: SLOT}
    steps = [run.step(step) for step in ({0: 13, 1: 9}, {0: 14, 1: 18}, *[{0: 1, 1: 1}] * 3)]
    return [torch.cat([step[sequence] for step in steps]) for sequence in range(2)]


def _check(directory: Path, make_ranks: Callable[[Ranks], Ranks], *, has_whole_experts: bool = False) -> None:
    targets = load(directory, ALONE, num_adapters=2).adapters
    assert targets is not None
    adapter = _random_adapter(targets)
    whole = _scores(directory, adapter)
    assert (whole[0] - whole[1]).abs().max() > 0.1
    found = on_ranks(
        2, lambda ranks: _scores(directory, adapter, make_ranks(ranks)), has_whole_experts=has_whole_experts
    )
    for row, expected in enumerate(whole):
        beside = torch.cat([rank[row] for rank in found], dim=1)[:, : expected.shape[1]]
        torch.testing.assert_close(beside, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "variant-llama",
        "variant-llama-mqa-biases",
        "recurrent-qwen3_5_moe",
        "recurrent-lfm2",
        "recurrent-bamba",
        "family-qwen2-moe",
    ],
)
def test_rows_of_two_ranks_score_as_those_of_one(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    _check(tmp_path, lambda ranks: ranks, has_whole_experts="moe" in name)


@pytest.mark.parametrize("name", ["variant-llama", "gguf-llama-mixed", "family-mixtral"])
def test_rows_of_ranks_that_compute_all_layers_in_one_call_score_as_those_of_one(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    _check(tmp_path, sharing_memory(2))


@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-head", "awq", "int8"])
def test_rows_beside_quantized_weights_of_two_ranks_score_as_those_of_one(name: str, tmp_path: Path) -> None:
    """Behind weights in another order, inputs are gathered: the adapter's own are those, too."""
    settings, pack, options = FORMS[name]
    make_checkpoint(tmp_path, settings, pack, **options)
    _check(tmp_path, lambda ranks: ranks)


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_rows_beside_packed_experts_of_two_ranks_score_as_those_of_one(has_whole_experts: bool, tmp_path: Path) -> None:
    save_packed(tmp_path, Case("GptOss", {**GPT_OSS.options, "num_local_experts": 4}))
    _check(tmp_path, lambda ranks: ranks, has_whole_experts=has_whole_experts)


def place_adapters(run: Run, adapters: list[Path], first: int = 0) -> None:
    """Read adapters and place them in slots from `first` on, at all ranks of a group."""
    targets = run.own.model.adapters
    assert targets is not None
    for slot, directory in enumerate(adapters, first):
        packed: PackedAdapter = read_packed(directory, targets, encode=encoded_pieces)
        if isinstance(run.runner, GroupRunner):
            run.runner.prepare_adapter(packed)
            run.runner.place_adapter(slot, packed)
        else:
            targets.place(slot, packed.packed, packed.max_rank)


def _sequences() -> list[Sequence]:
    sampling, shared = Sampling(temperature=0.0, max_tokens=10, logprobs=2), random_prompt(20, seed=1)
    found = []
    for number in range(9):
        slot = number % 3 - 1
        prompt = [*shared, *random_prompt(number // 3, seed=number // 3)]
        own = (None, b"") if slot < 0 else (slot, bytes([slot + 1]))
        sequence = Sequence(str(number), prompt, len(prompt), sampling, max_tokens=10, adapter=own[0], salt=own[1])
        found.append(sequence if number < 6 else limit(sequence, BlockBudget(4, 1, 1, 4)))
    return found


def test_two_processes_answer_as_one_before_and_after_a_rank_is_killed(tmp_path: Path) -> None:
    sizes = linear_sizes(save_tiny_model(tmp_path / "model"))
    adapters = [write_adapter(tmp_path / str(i), sizes, rank=3 + 4 * i, seed=i) for i in range(2)]
    settings = {"dtype": "float32", "max_loras": 2}

    def ways(run: Run) -> list[object]:
        return [run.answer(_sequences(), **way) for way in ({}, {"num_blocks": 32}, {"proposer": NgramProposer(99)})]

    with started(tmp_path / "model", 1, None, **settings) as (alone, _):
        place_adapters(alone, adapters)
        expected = ways(alone)
    assert len({tuple(expected[0].tokens[str(number)]) for number in range(3)}) == 3
    assert expected[0].tokens == expected[1].tokens == expected[2].tokens
    with started(tmp_path / "model", 2, None, **settings) as (run, group):
        assert group is not None
        place_adapters(run, adapters)
        for found, outcome in zip(ways(run), expected, strict=True):
            assert_same(found, outcome)
        replace_rank(run, group, 1, signal.SIGKILL)
        # The new one has what the one before was sent.
        for found, outcome in zip(ways(run), expected, strict=True):
            assert_same(found, outcome)
        # A slot gets another content, as where a name is swapped.
        place_adapters(run, adapters[:1] * 2)
        swapped = run.answer(_sequences())
        assert swapped.tokens["2"] == expected[0].tokens["1"]


def test_steps_are_computed_while_ranks_get_and_pack_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = linear_sizes(save_tiny_model(tmp_path / "model"))
    adapter, may_pack = write_adapter(tmp_path / "adapter", sizes, rank=3, seed=0), tmp_path / "may-pack"
    settings = {"dtype": "float32", "max_loras": 2}
    with started(tmp_path / "model", 1, None, **settings) as (alone, _):
        place_adapters(alone, [adapter] * 2)
        expected = alone.answer(_sequences())
    monkeypatch.setattr(process_module, "_MEMBER", full_member.__name__)
    monkeypatch.setenv(full_member.MAY_PACK, str(may_pack))
    with started(tmp_path / "model", 2, None, **settings) as (run, group), ThreadPoolExecutor(1) as pool:
        assert group is not None
        runner, targets = run.runner, run.own.model.adapters
        assert isinstance(runner, GroupRunner)
        assert targets is not None
        packed = [read_packed(adapter, targets, encode=encoded_pieces) for _ in range(6)]
        preparing = pool.submit(runner.prepare_adapter, packed[0])
        # Rank 1 computes though it has not packed the adapter, of which it was sent everything.
        assert len(run.answer(_sequences()[::3]).tokens) == 3
        assert not preparing.done()
        may_pack.touch()
        preparing.result(60)
        # Those for which no slot was found are forgotten; however many they are, none pushes out one that waits.
        runner.forget_adapter(packed[0])
        for other in (packed[4], *packed[1:4], packed[5]):
            runner.prepare_adapter(other)
        sent: list[bytes] = []
        tell = group.send
        monkeypatch.setattr(group, "send", lambda messages: tell(sent.extend(messages) or sent[-1:]))
        runner.place_adapter(0, packed[4])
        assert sum(map(len, sent)) < 64
        # What is not packed at the others any more is sent again.
        runner.place_adapter(1, packed[0])
        assert sum(map(len, sent)) > 10_000
        assert_same(run.answer(_sequences()), expected)


def test_adapter_that_a_rank_cannot_place_costs_nothing_but_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = linear_sizes(save_tiny_model(tmp_path / "model"))
    ranks = (3, 7, full_member.REFUSED // 3, 11)
    adapters = [write_adapter(tmp_path / str(rank), sizes, rank=rank, seed=rank) for rank in ranks]
    settings = {"dtype": "float32", "max_loras": 2}
    with started(tmp_path / "model", 1, None, **settings) as (alone, _):
        place_adapters(alone, adapters[:2])
        expected = alone.answer(_sequences())
    monkeypatch.setattr(process_module, "_MEMBER", full_member.__name__)
    with started(tmp_path / "model", 2, None, **settings) as (run, group):
        assert group is not None
        monkeypatch.setattr(AdapterTargets, "place", full_member.place_but(33))
        place_adapters(run, adapters[:1])
        for adapter, problem in ((adapters[2], "rank 1: MemoryError: no room"), (adapters[3], "^no room")):
            with pytest.raises((HeadraceError, MemoryError), match=problem):
                place_adapters(run, [adapter], 1)
            assert group.lost is None
        # What was refused is in the way of nothing: neither of the next one in its slot, nor of a new rank.
        place_adapters(run, adapters[1:2], 1)
        assert_same(run.answer(_sequences()), expected)
        with pytest.raises(HeadraceError):
            place_adapters(run, [adapters[2]], 1)
        replace_rank(run, group, 1, signal.SIGKILL)
        assert group.lost is None
        place_adapters(run, adapters[1:2], 1)
        assert_same(run.answer(_sequences()), expected)
        assert group.epoch == 2
        # One that had room, and has none when the group meets anew, ends the worker after a few attempts.

        def refuse(*_: object, **__: object) -> None:
            raise RankProblemError("rank 1: no room")

        monkeypatch.setattr(group.tasks, "do", refuse)
        group.end("rank 1 is gone")
        for _ in range(3):
            _interruption(run).recover()
        with pytest.raises(BrokenRunnerError, match="no room"):
            _interruption(run).recover()


def _interruption(run: Run) -> InterruptedRunnerError:
    assert isinstance(run.runner, GroupRunner)
    with pytest.raises(InterruptedRunnerError) as interruption:
        run.runner.check()
    return interruption.value
