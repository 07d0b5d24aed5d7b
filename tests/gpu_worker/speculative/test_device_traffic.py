"""What drafting costs a device in waits: one for a draft of all sequences, however deep it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Values
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.batch.rows import BlockTables
from gpu_worker.execution.batch.transfers import Download, Upload
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.speculative.eagle.layer import load_eagle_layer
from gpu_worker.speculative.hidden_vectors.proposer import EntryRows, HiddenVectorProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.draft_files import eagle_config, eagle_tensors, save_draft

_READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "equal"}
"""Functions that hand numbers of a tensor to Python, or whose result has a size that depends on them."""

_CREATIONS = {"tensor", "as_tensor", "from_numpy"}
"""Functions that make a tensor of the host's numbers: on a GPU, a copy that waits."""


@dataclass
class Traffic:
    """What happened.

    Attributes:
        reads: Names of the functions that read a tensor of the device.
        copies: Names of those that carried numbers to it outside of an upload.
        num_uploads: Uploads that carried something.
        num_downloads: Downloads that were waited for.
    """

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    num_uploads: int = 0
    num_downloads: int = 0


class _Recorder(TorchFunctionMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.hosts: list[torch.Tensor] = []
        self.is_sending = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Values[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_read = name in _READS and not self.is_sending
        if is_read and not any(args[0].data_ptr() == host.data_ptr() for host in self.hosts):
            self.traffic.reads.append(name)
        indexed = name == "__getitem__" and isinstance(args[1], list)
        if (name in _CREATIONS or indexed) and not self.is_sending:
            self.traffic.copies.append(name)
        result = func(*args, **(kwargs or {}))
        if name == "transpose" and any(args[0].data_ptr() == host.data_ptr() for host in self.hosts):
            self.hosts.append(result)
        return result


@contextmanager
def recorded_traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count what would make a host wait for a GPU, and what would be carried to it, while the block runs on a CPU.

    All tensors count as the device's but those that a `Download` has handed over.
    """
    traffic = Traffic()
    recorder = _Recorder(traffic)
    init, send, wait, tables = Upload.__init__, Upload.send, Download.wait, BlockTables.of

    def copying_init(upload: Upload, device: torch.device, *, is_copied: bool | None = None) -> None:
        init(upload, device, is_copied=True)

    def counted_send(upload: Upload) -> None:
        traffic.num_uploads += upload.num_bytes > 0
        recorder.is_sending = True
        send(upload)
        recorder.is_sending = False

    def device_tables(rows: BlockTables, numbers: torch.Tensor) -> torch.Tensor:
        # A CPU looks them up in the host's own tables, a GPU in those on the device.
        recorder.is_sending = True
        found = tables(rows, numbers)
        recorder.is_sending = False
        return found

    def counted_wait(download: Download) -> list[torch.Tensor]:
        traffic.num_downloads += 1
        recorder.hosts += (hosts := wait(download))
        return hosts

    with monkeypatch.context() as patch, recorder:
        patch.setattr(Upload, "__init__", copying_init)
        patch.setattr(Upload, "send", counted_send)
        patch.setattr(BlockTables, "of", device_tables)
        patch.setattr(Download, "wait", counted_wait)
        yield traffic


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
def eagle(pair_of: Callable[[str], Pair], tmp_path: Path) -> HiddenVectorProposer:
    save_draft(tmp_path, eagle_config(SIZE, VOCAB), eagle_tensors(SIZE))
    layer = load_eagle_layer(tmp_path, pair_of("llama").model)
    layer.relative_cost = 1e-9
    cache = allocate_kv_cache(8 * NUM_SEQS, BLOCK, layer.config, layer.dtype, layer.device)
    for tensor in cache.layers[0].tensors:
        tensor.zero_()
    return HiddenVectorProposer(layer, EntryRows(cache, NUM_SEQS, 8 * BLOCK, layer.device), max_num_batched_tokens=500)


def test_layer_keeps_a_block_table_for_each_sequence_of_a_step_and_no_more(eagle: HiddenVectorProposer) -> None:
    # And a spare one.
    assert eagle._rows._rows.whole.host.shape == (NUM_SEQS + 1, 8)


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
