"""Cost of a prefix from host memory, files, or another worker, and the cost to streams of keeping it.

Run as `python -m ops.bench.kv_tiers [--shape 15m] [--prompt 8192]`. Engine, scheduler and runner are real, without
queue and tokenizer, on the CPU; engines share a runner and take turns. A prompt is served, others overwrite it, and it
comes again: the time to its first token beside that of computing it. From another worker, the time to its second token,
over TCP, by shared memory and (where it is installed) by NIXL over TCP in turns, both workers in this process. Beside
streams: the time between their tokens while prompts are computed, with all blocks copied and written to files, and
without tiers. With `--roles`, of the whole system instead: from the first to the second token of long prompts beside
streams, with roles and without.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Values
from dataclasses import replace
from pathlib import Path

import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.tiers import shared_memory
from gpu_worker.execution.tiers.block_files import BlockFiles
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.file_store import DirectoryStore
from gpu_worker.execution.tiers.host_tier import HostTier
from gpu_worker.execution.tiers.nixl_transport import NixlAgent
from gpu_worker.execution.tiers.transfer import Transfer
from ops.bench.comparison import median_ratio, model_of
from ops.bench.make_model import SHAPES
from ops.bench.record import ResultTable, bench_parser, positive
from ops.bench.stepping import BLOCK_SIZE, SteppedEngine, engine_of
from ops.bench.systems import address_of, headrace_up, own_settings
from ops.load_generator.answer import read
from ops.load_generator.connection import Address
from ops.load_generator.rounds import ask_each
from ops.simulation.outcome import percentile
from ops.stack.plan import DEMO_MODEL_NAME

TOKEN_BUDGET = 512
NUM_STREAMS = 4
_MAX_SETTLE_S = 30.0
_LINE = "def function_{0}(value):\n    return value * {0} + {0} % 7\n"


class Worker:
    """An engine with empty caches over a runner that others use in turns, and its tiers."""

    def __init__(self, runner: TorchModelRunner, directory: Path | None = None, way: str | None = None) -> None:
        """Keep KV in the host's memory, in a directory if one is given, and for other workers by a `way` if given."""
        groups = runner.block_contents
        host_bytes = 3 * sum(group.row_bytes * group.num_blocks for group in groups)
        host = HostTier(groups, host_bytes, is_shared=way is not None)
        maker = Maker(b"w" * 32, tuple(bytes([number]) * 32 for number, _ in enumerate(groups)))
        self.files = self.transfer = None
        if directory is not None:
            tokens = [BLOCK_SIZE] * len(groups)
            self.files = BlockFiles(DirectoryStore(directory), groups, tokens, 1 << 40, host, lambda: maker)
            self.files.is_ready.wait()
        if way is not None:
            largest = max(group.row_bytes for group in groups)
            nixl = NixlAgent(host.regions, largest) if way == "nixl" else None
            self.transfer = Transfer(groups, BLOCK_SIZE, host, "127.0.0.1", 60.0, lambda: maker, nixl)
            transfer = self.transfer
            _wait_until(lambda: transfer.maker)
        self.tiers = BlockTiers(groups, BLOCK_SIZE, host, self.files, self.transfer)
        self.engine = engine_with(runner, self.tiers)


def engine_with(runner: TorchModelRunner, tiers: BlockTiers | None) -> SteppedEngine:
    """Return an engine with empty caches."""
    runner.clear()
    return engine_of(runner, max_num_seqs=NUM_STREAMS + 2, token_budget=TOKEN_BUDGET, tiers=tiers)


def restored_s(runner: TorchModelRunner, prompt: int, rounds: int, directory: Path | None) -> dict[str, object]:
    """Compare the time to the first token of computing and of restoring, in pairs."""
    cold, restored, hits = [], [], 0
    for number in range(rounds):
        folder = None if directory is None else directory / str(number)
        worker = Worker(runner, folder)
        text = worker.engine.random_prompt(prompt)
        cold.append(worker.engine.serve_s([text], 1))
        if worker.files is not None:
            _settle(worker.files)
            worker.tiers.close()
            worker = Worker(runner, folder)
        else:
            worker.engine.serve_s([worker.engine.random_prompt(prompt)], 1)
        before = worker.engine.engine.stats.num_prefix_hits
        restored.append(worker.engine.serve_s([text], 1))
        hits += worker.engine.engine.stats.num_prefix_hits - before
        worker.tiers.close()
    return _row(f"restored from {'files' if directory else 'host'}", cold, restored, share=hits / (rounds * prompt))


def second_token_s(runner: TorchModelRunner, prompt: int, rounds: int) -> list[dict[str, object]]:
    """Compare ways with TCP: the time from a lease to the next token, and the rate of the bytes alone."""
    ways = ["tcp", "shared", *(["nixl"] if importlib.util.find_spec("nixl") else [])]
    # Else it reads in one process without any network.
    os.environ.setdefault("UCX_TLS", "tcp")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    hits = dict.fromkeys(ways, 0)
    connect = shared_memory.connect
    for number in range(rounds + 1):
        for way in reversed(ways) if number % 2 else ways:
            shared_memory.connect = connect if way == "shared" else (lambda *_: None)
            elapsed, rate, num_hits = _second_token(runner, prompt, way)
            if number:
                seconds[way].append(elapsed)
                rates[way].append(rate)
                hits[way] += num_hits
    shared_memory.connect = connect
    gigabytes = {f"{way}_gb_s": round(statistics.median(rates[way]), 3) for way in ways}
    share = {way: hits[way] / (rounds * prompt) for way in ways}
    return [_row(f"second token, {way}", seconds["tcp"], seconds[way], share[way]) | gigabytes for way in ways[1:]]


def _second_token(runner: TorchModelRunner, prompt: int, way: str) -> tuple[float, float, int]:
    """Return the seconds to the second token, the gigabytes a second of the bytes alone, and the tokens fetched."""
    prefill = Worker(runner, way=way)
    begun = prefill.engine.add(prefill.engine.random_prompt(prompt), 2)
    prefill.engine.run()
    decode = Worker(runner, way=way)
    assert prefill.transfer is not None
    assert decode.transfer is not None
    rate = _read_all(prefill.transfer, decode.transfer, begun)
    started = time.perf_counter()
    _open(prefill.transfer, decode.transfer, begun)
    elapsed = time.perf_counter() - started + decode.engine.serve_s([begun.token_ids[:-1]], 1)
    decode.transfer.peers.close(begun.id, 1, is_done=True)
    prefill.tiers.close()
    decode.tiers.close()
    return elapsed, rate, decode.engine.engine.stats.num_prefix_hits


def _open(giving: Transfer, fetching: Transfer, begun: Sequence) -> None:
    lease = giving.leases.grant(begun.id, 1, begun.salt, begun.block_digests)
    assert lease is not None
    assert fetching.peers.open("prefill", giving.server.address, lease.token, begun.id, 1, begun.num_tokens)


def _read_all(giving: Transfer, fetching: Transfer, begun: Sequence) -> float:
    """Return the gigabytes a second of fetching and verifying all that a sequence has left."""
    _open(giving, fetching, begun)
    names = [(0, digest) for digest in begun.block_digests[: begun.num_prompt_tokens // BLOCK_SIZE]]
    fetching.peers.expect(names)
    started = time.perf_counter()
    contents = [fetching.peers.read(*name, begun.salt) for name in names]
    elapsed = time.perf_counter() - started
    fetching.peers.close(begun.id, 1, is_done=True)
    _wait_until(lambda: not len(giving.leases))
    return sum(content.nbytes for content in contents if content is not None) / elapsed / 1e9


def stream_itl_s(
    runner: TorchModelRunner, prompt: int, rounds: int, directory: Path, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Return the mean seconds between tokens of streams beside prompts, in pairs: without tiers, and with them.

    By the `clock`: the time, or that of the engine's thread on a core, which others on the machine do not disturb.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for has_tiers in (True, False) if number % 2 else (False, True):
            folder = Path(tempfile.mkdtemp(dir=directory))
            worker = Worker(runner, folder) if has_tiers else None
            engine = engine_with(runner, None) if worker is None else worker.engine
            streams = [engine.add(engine.random_prompt(32), runner.max_model_len - 32) for _ in range(NUM_STREAMS)]
            engine.prefill(streams)
            before = sum(stream.num_output_tokens for stream in streams)
            started = clock()
            for _ in range(3):
                engine.prefill([engine.add(engine.random_prompt(prompt), 2)])
            elapsed = clock() - started
            num_tokens = (sum(stream.num_output_tokens for stream in streams) - before) / NUM_STREAMS
            if number:
                seconds[has_tiers].append(elapsed / num_tokens)
            engine.abort(streams)
            if worker is not None:
                worker.tiers.close()
    return seconds[False], seconds[True]


async def _gaps_s(address: Address, rounds: int) -> tuple[list[float], list[float]]:
    """Return the first gap of each of some long prompts, and all gaps of the streams beside them."""
    prompts = [(0.0, _demo_request(address, f"stream {number}", 4, 400)) for number in range(NUM_STREAMS)]
    streams = asyncio.create_task(ask_each(address, prompts))
    first = []
    for number in range(rounds):
        ((answer,),) = await ask_each(address, [(0.0, _demo_request(address, f"long {number}", 75, 4))])
        first.append(read(answer).gaps_s[0])
    return first, [gap for (answer,) in await streams for gap in read(answer).gaps_s]


def _demo_request(address: Address, name: str, num_lines: int, max_tokens: int) -> bytes:
    text = f"# {name} {time.time()}\n" + "".join(map(_LINE.format, range(num_lines)))
    return address.completion(text, max_tokens, closes=True, temperature=0)


def roles_rows(rounds: int) -> list[dict[str, object]]:
    """Measure the whole system with workers of two kinds, and of one."""
    rows: list[dict[str, object]] = []
    for roles in ("both,both", "prefill,decode"):
        arguments = ["--workers", "2", "--roles", roles, "--num-threads", "1"]
        with headrace_up(arguments, own_settings(), 120.0) as ready:
            address = address_of(ready, DEMO_MODEL_NAME)
            # Until workers have heard of one another.
            asyncio.run(_gaps_s(address, 3))
            first, gaps = asyncio.run(_gaps_s(address, rounds))
        long, p99 = statistics.median(first), percentile(gaps, 99)
        rows.append({"roles": roles, "first_to_second_ms": round(long * 1e3), "gaps_p99_ms": round(p99 * 1e3)})
    return rows


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _MAX_SETTLE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _settle(files: BlockFiles) -> None:
    """Wait until nothing more is written."""
    deadline, previous = time.monotonic() + _MAX_SETTLE_S, -1
    while (now := files.stored_bytes) != previous and time.monotonic() < deadline:
        previous = now
        time.sleep(0.3)


def _row(name: str, base: list[float], other: list[float], share: float | None = None) -> dict[str, object]:
    """Return medians in ms, and that of the ratios of pairs."""
    medians = [round(statistics.median(each) * 1e3, 2) for each in (base, other)]
    row = {"measurement": name, "rounds": len(base), "base_ms": medians[0], "ms": medians[1]}
    return row | {"ratio": median_ratio(other, base, 4), "hit_share": None if share is None else round(share, 4)}


def main(arguments: Values[str] | None = None) -> None:
    """Measure, print and record."""
    parser = bench_parser("kv_tiers", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="15m", help="of random weights")
    parser.add_argument("--prompt", type=positive, default=8192, help="tokens of the prompts that are restored")
    parser.add_argument("--rounds", type=positive, default=5, help="pairs of each measurement")
    parser.add_argument("--num-threads", type=positive, help="of CPU operations; by default as many as a worker takes")
    parser.add_argument("--roles", action="store_true", help="measure the whole system with roles instead")
    options = parser.parse_args(arguments)
    if options.roles:
        ResultTable("kv_tiers").add_all(roles_rows(options.rounds), model=DEMO_MODEL_NAME)
        return
    longest = options.prompt + 16
    shape = replace(SHAPES[options.shape], max_len=longest)
    with model_of(shape) as model, tempfile.TemporaryDirectory() as directory:
        num_blocks = (longest + NUM_STREAMS * 600) // BLOCK_SIZE + 8
        config = RunnerConfig(model, num_blocks=num_blocks, max_num_seqs=8, num_threads=options.num_threads)
        config = replace(config, max_model_len=longest, max_num_batched_tokens=TOKEN_BUDGET)
        runner, rounds = build_runner(config), options.rounds
        rows = [restored_s(runner, options.prompt, rounds, folder) for folder in (None, Path(directory))]
        rows += second_token_s(runner, options.prompt, rounds)
        for what, clock in (("time", time.perf_counter), ("processor time", time.thread_time)):
            pairs = stream_itl_s(runner, options.prompt // 8, rounds, Path(directory), clock)
            rows.append(_row(f"streams beside offloading, {what}", *pairs))
        common = {"model": options.shape, "prompt": options.prompt, "dtype": str(runner.dtype)}
    ResultTable("kv_tiers").add_all(rows, **common, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
