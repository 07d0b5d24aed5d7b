"""What drafting costs a device in waits: one for a draft of all sequences, however deep it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.speculative.eagle import layer as eagle_layer
from gpu_worker.speculative.eagle.layer import load_eagle_layer
from gpu_worker.speculative.hidden_vectors.entry_rows import EntryRows
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.device_traffic import Traffic, recorded_traffic
from tests.gpu_worker.speculative.draft_files import (
    eagle_config,
    eagle_tensors,
    save_draft,
)

SIZE, VOCAB = int(SIZES["hidden_size"]), int(SIZES["vocab_size"])
BLOCK, NUM_SEQS = 4, 5


class Batch:
    """Sequences that decode, and what each step leaves behind of them."""

    def __init__(self) -> None:
        self.sequences = [
            Sequence(str(i), list(range(1, 8 + i)), 7 + i, Sampling(), 99, block_table=list(range(8 * i, 8 * i + 8)))
            for i in range(NUM_SEQS)
        ]
        self.num_computed = [0] * NUM_SEQS

    def step(self) -> list[ComputedTokens]:
        computed = []
        for index, sequence in enumerate(self.sequences):
            start, known = self.num_computed[index], len(sequence.token_ids)
            token_ids = (*sequence.token_ids[start:], 3)
            computed.append(ComputedTokens(sequence, start, token_ids, torch.randn(known - start, SIZE)))
            sequence.token_ids.append(3)
            self.num_computed[index] = known
        return computed

    def requests(self, depth: int) -> list[DraftRequest]:
        return [DraftRequest(sequence, max(1, depth - index)) for index, sequence in enumerate(self.sequences)]


@pytest.fixture
def eagle(pair_of: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HiddenVectorProposer:
    """A layer in the form that GPUs run, operation by operation."""
    monkeypatch.setattr(eagle_layer, "fusing_library", lambda *_: None)
    save_draft(tmp_path, eagle_config(SIZE, VOCAB), eagle_tensors(SIZE))
    layer = load_eagle_layer(tmp_path, pair_of("llama").model)
    layer.relative_cost = 1e-9
    cache = allocate_kv_cache(8 * NUM_SEQS, BLOCK, layer.config, layer.dtype, layer.device)
    for tensor in cache.layers[0].tensors:
        tensor.zero_()
    return HiddenVectorProposer(layer, EntryRows(cache, NUM_SEQS, 8 * BLOCK, layer.device), max_num_batched_tokens=500)


@torch.inference_mode()
def traffic_of(proposer: HiddenVectorProposer, depth: int, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    batch = Batch()
    proposer.observe(batch.step())
    proposer.propose(batch.requests(depth))
    proposer.observe(batch.step())
    with recorded_traffic(monkeypatch) as traffic:
        drafts = proposer.propose(batch.requests(depth))
    assert all(drafts)
    return traffic


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_eagle_drafts_with_one_upload_and_one_wait_whatever_the_depth(
    eagle: HiddenVectorProposer, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traffic_of(eagle, depth, monkeypatch) == Traffic([], [], 1, 1)


@torch.inference_mode()
def test_what_is_observed_waits_for_nothing(eagle: HiddenVectorProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    computed = [batch.step() for _ in range(3)]
    with recorded_traffic(monkeypatch) as traffic:
        for step in computed:
            eagle.observe(step)
    assert traffic == Traffic()


def test_steps_that_verify_drafts_wait_for_their_tokens_and_their_drafts_only(
    eagle: HiddenVectorProposer, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair_of("llama").model
    cache = allocate_kv_cache(8 * NUM_SEQS, BLOCK, model.config, model.dtype, model.device)
    runner = TorchModelRunner(model, cache, NUM_SEQS, 8 * BLOCK, 64, 3, is_asynchronous=True)
    runner.verify_drafts_of(eagle)
    sizes = SchedulerConfig(
        block_size=BLOCK, num_blocks=8 * NUM_SEQS, max_num_seqs=NUM_SEQS, max_num_batched_tokens=64, max_model_len=32
    )
    engine = Engine(Scheduler(sizes, speculation := Speculation(FixedDepth(3))), runner)
    for index in range(NUM_SEQS):
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        engine.add(Sequence(str(index), list(range(1, 6 + index)), 5 + index, sampling, 12))
    with recorded_traffic(monkeypatch) as traffic:
        while engine.has_work():
            engine.step()
    assert engine.last_error is None
    assert speculation.num_draft_tokens > 0
    num_steps = engine.stats.step
    assert (traffic.reads, traffic.copies) == ([], [])
    assert traffic.num_downloads < 2 * num_steps
    # The step, what it computed for the proposer, and accepted tokens that move; EAGLE's entries.
    assert traffic.num_uploads <= 4 * num_steps


def test_recorder_notices_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(4)
    with recorded_traffic(monkeypatch) as traffic:
        numbers.tolist()
        numbers[1].item()
        bool(numbers[0] == 0)
        numbers[[1, 2]]
        torch.tensor([1])
    assert traffic == Traffic(["tolist", "item", "__bool__"], ["__getitem__", "tensor"])
