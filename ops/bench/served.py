"""Whole servers beside each other over HTTP, on this machine's CPU: the engine's speed as a client sees it.

Run as `make bench-served` or `python -m ops.bench.served`. Ours runs with its queue, beside llama.cpp's and vLLM's
servers at equal precision: random prompts in token ids, streams that begin together, decode rates as `engine_compare`
takes them, from the last first token to the first end. Each round starts every server anew, and measures our engine
without a queue too. Medians are printed, with ratios to the best peer, and appended to `results/served.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from ops.bench.comparison import OURS, add_load_options, add_shapes, compare, loads_of
from ops.bench.engine import Load
from ops.bench.make_model import SHAPES, Shape, make_model
from ops.bench.peers.engines import PeerUnavailableError, Server, Task, max_tokens, measure_ours, servers
from ops.bench.record import ResultTable, add_list, bench_parser
from ops.load_generator.answer import read
from ops.load_generator.connection import Address, Answer
from ops.load_generator.rounds import ask_each
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob

# By the name of a precision: the method of ours, whose checkpoint vLLM reads too, and llama.cpp's own, which rounds the
# head as well.
PRECISIONS = {"bfloat16": (None, "BF16"), "int8": ("int8", "Q8_0"), "int4": ("rtn-int4", "Q4_0")}
_GROUP_SIZE = 64
_TIMEOUT_S = 600.0
# Tokens without text, like the end of a sequence that is ignored, are rare among thousands of words; one answer of a
# hundred tokens may have several.
_LEAST_SHARE_OF_TOKENS = 0.9
_RATES = ("decode_tokens_per_s", "of_best_peer", "engine_alone_tokens_per_s", "ttft_p50_ms", "ttft_max_ms")
_COLUMNS = ("model", "dtype", "engine", "batch", *_RATES)


class StreamError(PeerUnavailableError):
    """An answer was refused, ended early, or cannot be compared."""


@dataclass(frozen=True, slots=True)
class Served:
    """Result of a server with streams that began together.

    Attributes:
        decode_rate: Tokens per second of all, from the last stream's first token to the first stream's last one.
        engine_alone_rate: Decode rate of the server's engine without a server, where that is measured too.
    """

    decode_rate: float
    ttft_p50_s: float
    ttft_max_s: float
    engine_alone_rate: float | None = None

    def others(self) -> dict[str, float]:
        """Return the figures of a comparison to record beside the decode rate."""
        alone = self.engine_alone_rate
        times = {"ttft_p50_ms": round(self.ttft_p50_s * 1e3, 1), "ttft_max_ms": round(self.ttft_max_s * 1e3, 1)}
        return times | ({} if alone is None else {"engine_alone_tokens_per_s": round(alone, 1)})


async def serve_streams(address: Address, prompts: list[list[int]], max_tokens: int) -> Served:
    """Ask for a completion of `max_tokens` of each prompt, all at once.

    Raises:
        StreamError: The server does not listen, an answer does not match its request, or streams do not overlap.
    """
    requests = [(0.0, address.completion(prompt, max_tokens, closes=True, temperature=0)) for prompt in prompts]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answers = [answer for (answer,) in await ask_each(address, requests)]
    except TimeoutError:
        raise StreamError(f"answers took longer than {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise StreamError(f"{address.host}:{address.port} takes no connection: {error.strerror}") from None
    return measure_streams([(answer.sent_at, token_times(answer, max_tokens)) for answer in answers])


def measure_streams(streams: list[tuple[float, list[float]]]) -> Served:
    """Return what streams show, each of which was asked for at a time and has the times of its tokens.

    Raises:
        StreamError: One ended before the last one began.
    """
    began, ended = max(times[0] for _, times in streams), min(times[-1] for _, times in streams)
    if ended <= began:
        raise StreamError("a stream ended before the last one began; ask for more tokens with --new")
    count = sum(began < moment <= ended for _, times in streams for moment in times)
    waits = [times[0] - sent_at for sent_at, times in streams]
    return Served(count / (ended - began), median(waits), max(waits))


def token_times(answer: Answer, max_tokens: int) -> list[float]:
    """Return when each token's text had arrived.

    Raises:
        StreamError: The answer is an error, or has other than about `max_tokens` tokens.
    """
    reading = read(answer)
    if reading.problem is not None and not reading.texts:
        raise StreamError(reading.problem)
    times = [moment for moment, text in reading.texts for _ in text.split()]
    if not _LEAST_SHARE_OF_TOKENS * max_tokens <= len(times) <= max_tokens:
        raise StreamError(f"an answer has {len(times)} tokens, not {max_tokens}; it ends: {reading.text[-200:]!r}")
    return times


def measure(server: Server, task: Task, vocab_size: int, number: int) -> dict[int, Served]:
    """Start a server and measure it, in the round of a number; ours also without queue and gateway."""
    with server.run(task) as address:
        served = asyncio.run(_serve(address, task.loads, vocab_size, number))
    if server.name == OURS:
        alone = measure_ours(task)
        served = {batch: replace(one, engine_alone_rate=alone[batch].decode_rate) for batch, one in served.items()}
    return served


async def _serve(address: Address, loads: list[Load], vocab_size: int, number: int) -> dict[int, Served]:
    """Serve a few tokens of the largest load to warm up, then each load; prompts depend on the round."""
    generator, vocabulary = random.Random(number), range(3, vocab_size)

    async def serve(load: Load, new: int) -> Served:
        prompts = [generator.choices(vocabulary, k=load.prompt) for _ in range(load.batch)]
        return await serve_streams(address, prompts, max_tokens(load.batch, new))

    await serve(max(loads, key=lambda load: load.batch), 1)
    return {load.batch: await serve(load, load.new) for load in loads}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on every shape and precision."""
    parser = bench_parser("served", __doc__)
    add_shapes(parser)
    add_list(parser, "--precisions", str, ["bfloat16"], "what the models are rounded to", PRECISIONS)
    add_list(parser, "--servers", str, None, "ours and only these, separated by commas")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    table = ResultTable("served", _COLUMNS)
    for size in options.shapes:
        for precision in options.precisions:
            _compare(size, precision, options, table)


def _compare(size: str, precision: str, options: argparse.Namespace, table: ResultTable) -> None:
    shape, (method, llama_precision) = SHAPES[size], PRECISIONS[precision]
    with _models(shape, method) as (plain, model):
        found = servers(options.cache, plain, llama_precision)
        if options.servers is not None:
            found = [server for server in found if server.name in (OURS, *options.servers)]
        task = Task(model, loads_of(options), options.num_threads)
        in_round = {server.name: partial(measure, server, task, shape.vocab_size) for server in found}
        versions = {server.name: server.version for server in found}
        asked = {"model": size, "dtype": precision, "threads": options.num_threads}
        compare(table, in_round, options, versions, (OURS, *(options.servers or ())), **asked)


@contextmanager
def _models(shape: Shape, method: str | None) -> Iterator[tuple[Path, Path]]:
    """Make a plain model of a shape, and the one that a method makes of it, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        plain, rounded = Path(name) / "plain", Path(name) / "rounded"
        make_model(shape, plain)
        if method is None:
            yield plain, plain
            return
        job = QuantizeJob(plain, rounded, method, _GROUP_SIZE, None, 0, 0, "cpu", lm_head=not shape.is_tied)
        for _ in quantize(job):
            pass
        yield plain, rounded


if __name__ == "__main__":
    main()
