"""How well a simulated fleet predicts a real one: `python -m ops.bench.simulate`.

Runs the whole system as `headrace up` does, on this machine, and fits the times of its steps to some loads: streams
that begin together, in batches of several sizes and lengths, and prompts that come alone. Then it scores what `headrace
simulate` says of others: requests that come at random at several rates, with lengths of their own, and more than the
system can serve. Prints measured beside predicted, and writes the profile with the errors that it has found.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.request import Request, urlopen

from ops.bench.options import bench_parser
from ops.bench.record import ResultTable
from ops.bench.systems import address_of, headrace_up, own_settings
from ops.load_generator.answer import Reading, read
from ops.load_generator.connection import Address, Answer
from ops.load_generator.rounds import ask_each
from ops.simulation.fit import FirstToken, Fit, Gap, fit, spread
from ops.simulation.outcome import percentile
from ops.simulation.profile import Profile, WorkerLimits, write_profile
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.step_time import Chunk, HostTimes
from ops.simulation.workload import Arrival, Synthetic

WORKER = WorkerLimits(16, 4000, 16, 512, 2048)
VOCABULARY = range(20, 1000)
BATCHES = ((1, 40, 64), (2, 40, 64), (4, 40, 64), (8, 40, 64), (16, 40, 64), (4, 700, 48), (8, 400, 48))
PROMPTS = (20, 120, 480, 900, 1500)
_TIMEOUT_S, _AHEAD_S = 300.0, 0.05
_REPEATED = 3
_SETTLED = 2
_MEASURES = ("tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
AT_ONCE = "all at once"
_COLUMNS = ("engine", "load", "measure", "measured", "predicted", "error")


@dataclass(frozen=True, slots=True)
class System:
    """The system that is measured."""

    address: Address
    metrics_url: str
    operator_key: str
    _seeds: Iterator[int] = field(default_factory=itertools.count)

    def serve(self, arrivals: Sequence[Arrival]) -> list[Reading]:
        """Serve requests with prompts that none had before: nothing of them is in the prefix cache.

        Raises:
            SystemExit: One was refused or broken off.
        """
        draw = random.Random(next(self._seeds))
        prompts = (draw.choices(VOCABULARY, k=each.prompt) for each in arrivals)
        requests = [
            (_AHEAD_S + each.at, self.address.completion(prompt, each.output, closes=True, temperature=0))
            for each, prompt in zip(arrivals, prompts, strict=True)
        ]
        return [answered(answer) for (answer,) in asyncio.run(_asked(self.address, requests))]

    def steps(self) -> tuple[int, float]:
        """Return how many steps its worker has taken so far, and their seconds."""
        lines = _get(self.metrics_url, self.operator_key).splitlines()
        found = dict.fromkeys(("sum", "count"), 0.0)
        for line in lines:
            for name in found:
                if line.startswith(f"headrace_worker_step_seconds_{name}{{"):
                    found[name] += float(line.rsplit(" ", 1)[1])
        return int(found["count"]), found["sum"]


async def _asked(address: Address, requests: Sequence[tuple[float, bytes]]) -> list[list[Answer]]:
    async with asyncio.timeout(_TIMEOUT_S):
        return await ask_each(address, requests)


def answered(answer: Answer) -> Reading:
    """Read an answer, which must be whole."""
    reading = read(answer)
    if reading.problem is not None:
        raise SystemExit(f"a request was not answered as a whole: {reading.problem}")
    return reading


def _get(url: str, key: str) -> str:
    with urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=10) as answer:
        return str(answer.read(), "utf-8")


def _served_model(url: str, key: str) -> str:
    name = json.loads(_get(f"{url}/v1/models", key))["data"][0]["id"]
    assert isinstance(name, str)
    return name


def fitted(system: System, rounds: int) -> tuple[Fit, HostTimes, tuple[float, ...]]:
    """Measure the loads that times are fitted to; return these, the host's part of them, and the spread of gaps.

    Each load is served once a round, and medians over all rounds are fitted: other work on the machine comes and goes.
    """
    gaps: list[Gap] = []
    hosts: list[float] = []
    firsts: dict[int, list[float]] = {prompt: [] for prompt in PROMPTS}
    for _ in range(rounds):
        for batch, prompt, output in BATCHES:
            before = system.steps()
            found = _gaps(system.serve([Arrival(0.0, prompt, output)] * batch), batch, prompt)
            num_steps, seconds = (now - then for now, then in zip(system.steps(), before, strict=True))
            gaps += found
            # What a step takes on the worker is a part of the time from one to the next.
            mean_s = statistics.mean(gap.seconds for gap in found)
            hosts.append(max(0.0, mean_s - seconds / max(1, num_steps)))
        for prompt in PROMPTS:
            for _ in range(_REPEATED):
                (seen,) = system.serve([Arrival(0.0, prompt, 2)])
                firsts[prompt].append(seen.ttft_s)
    typical = _medians(gaps)
    alone = [FirstToken(statistics.median(times), _chunks(prompt)) for prompt, times in firsts.items()]
    # As many of both, so that neither is fitted at the cost of the other.
    found_fit = fit([*typical, *(alone * (len(typical) // len(alone)))])
    ratios = spread(gaps, found_fit.times)
    host_s = min(statistics.median(hosts), found_fit.times.fixed_s)
    device = replace(found_fit.times, fixed_s=found_fit.times.fixed_s - host_s)
    return Fit(device, found_fit.latency_s), HostTimes(host_s), ratios


def _gaps(answers: Sequence[Reading], batch: int, prompt: int) -> list[Gap]:
    """Return the times between tokens while all streams of a batch decoded."""
    begin = max(seen.texts[0][0] for seen in answers)
    end = min(seen.texts[-1][0] for seen in answers)
    gaps = []
    for seen in answers:
        for place in range(_SETTLED, len(seen.texts)):
            earlier, later = seen.texts[place - 1][0], seen.texts[place][0]
            if begin <= earlier and later <= end and later > earlier:
                gaps.append(Gap(later - earlier, batch, batch * (prompt + place)))
    return gaps


def _medians(gaps: Sequence[Gap]) -> list[Gap]:
    """Return one gap for each batch and about as many tokens of context: the median."""
    groups: dict[tuple[int, int], list[Gap]] = {}
    for gap in gaps:
        groups.setdefault((gap.num_decodes, gap.num_context // (8 * gap.num_decodes)), []).append(gap)
    found = []
    for group in groups.values():
        median = statistics.median(gap.seconds for gap in group)
        context = round(statistics.mean(gap.num_context for gap in group))
        found.append(Gap(median, group[0].num_decodes, context))
    return found


def _chunks(prompt: int) -> tuple[Chunk, ...]:
    size = WORKER.max_num_batched_tokens
    return tuple((start, min(size, prompt - start)) for start in range(0, prompt, size))


def unseen_loads(saturation: float, seed: int) -> Iterator[tuple[str, list[Arrival]]]:
    """Yield loads that nothing was fitted to: rates as shares of what is served at most, and more than that."""
    for share in (0.3, 0.6, 0.8):
        rate = share * saturation
        load = Synthetic(max(40, round(12 * rate)), rate, 150, 60, spread=0.6)
        yield f"{share:.0%} of saturation", _bounded(load.arrivals(seed))
    yield "bursts of 12", _bounded(Synthetic(96, 0.5 * saturation, 250, 40, 0.3, burstiness=1 / 9).arrivals(seed))
    yield AT_ONCE, _bounded(Synthetic(120, math.inf, 200, 50, spread=0.5).arrivals(seed))


def _bounded(arrivals: Iterator[Arrival]) -> list[Arrival]:
    """Return requests that fit the model's context."""
    return [replace(each, prompt=min(each.prompt, 1500), output=min(each.output, 400)) for each in arrivals]


def measured(answers: Sequence[Reading]) -> dict[str, float]:
    """Return what clients saw."""
    begin, end = min(seen.sent_at for seen in answers), max(seen.texts[-1][0] for seen in answers)
    ttfts = [seen.ttft_s for seen in answers]
    # Tokens that come together have no time between them, as in the simulation.
    pairs = (pair for seen in answers for pair in itertools.pairwise(seen.texts))
    gaps = [later - earlier for (earlier, _), (later, _) in pairs]
    return dict(
        zip(
            _MEASURES,
            (
                sum(len(seen.texts) for seen in answers) / (end - begin),
                *(percentile(ttfts, percent) for percent in (50, 99)),
                *(percentile(gaps, percent) for percent in (50, 99)),
            ),
            strict=True,
        )
    )


def predicted(profile: Profile, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Return what the simulation says."""
    scenario = Scenario(1, profile.worker.config(), profile.times, ttft_slo_s=1e6, latency_s=profile.latency_s)
    outcome = simulate(scenario, iter(arrivals))
    found = (outcome.output_tokens_per_s, *outcome.ttft_s.values(), *outcome.itl_s.values())
    return dict(zip(_MEASURES, found, strict=True))


def score(system: System, profile: Profile, engine: str, rounds: int, seed: int) -> Profile:
    """Score a profile on loads that it was not fitted to; return it with its errors, the largest of each measure.

    What is measured is the median of all rounds.
    """
    saturation = predicted(profile, [Arrival(0.0, 150, 60)] * 96)["tokens_per_s"] / 60
    loads = dict(unseen_loads(saturation, seed))
    seen = [{name: measured(system.serve(load)) for name, load in loads.items()} for _ in range(rounds)]
    table, errors = ResultTable("simulate", _COLUMNS), dict[str, float]()
    for name, load in loads.items():
        said = predicted(profile, load)
        # Of a load that the system cannot serve, the time to first token is that of the queue alone.
        for measure in _MEASURES if name != AT_ONCE else _MEASURES[:1]:
            real = statistics.median(each[name][measure] for each in seen)
            error = said[measure] / real - 1 if real else math.inf
            key, unit = ("saturation" if name == AT_ONCE else measure), (1.0 if measure == _MEASURES[0] else 1e3)
            errors[key] = max(errors.get(key, 0.0), round(abs(error), 4))
            row = {"measured": round(unit * real, 2), "predicted": round(unit * said[measure], 2)}
            table.add({"engine": engine, "load": name, "measure": key, **row, "error": f"{error:+.1%}"}, rounds=rounds)
    return replace(profile, errors=errors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, fit and score."""
    options = _parser().parse_args(arguments)
    settings = {"MAX_NUM_SEQS": WORKER.max_num_seqs, "NUM_BLOCKS": WORKER.num_blocks}
    settings |= {"MAX_NUM_BATCHED_TOKENS": WORKER.max_num_batched_tokens, "CACHE_TTL_S": 0}
    settings |= {"INTERACTIVE_TTFT_SLO_S": 600, "NUM_THREADS": options.threads}
    step_ms = None if options.step_ms is None else f"{options.step_ms:g}"
    engine = "the demo model" if step_ms is None else f"simulated, {step_ms} ms"
    command = [] if step_ms is None else ["--simulate", step_ms]
    with headrace_up(command, own_settings(**settings)) as ready:
        address = address_of(ready, _served_model(ready["url"], ready["api_key"]))
        system = System(address, ready["metrics_url"], ready["operator_key"])
        system.serve([Arrival(0.0, 100, 30)] * 4)
        found, host, ratios = fitted(system, options.rounds)
        profile = Profile(f"headrace up, {engine}", found.times, host, found.latency_s, WORKER, ratios)
        profile = score(system, profile, engine, options.rounds, options.seed)
    if options.profile is not None:
        write_profile(profile, options.profile)
    print("largest errors:", ", ".join(f"{name} {error:.0%}" for name, error in profile.errors.items()))


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("simulate", __doc__)
    parser.add_argument("--step-ms", type=float, help="serve no model: a simulated engine whose steps take so long")
    parser.add_argument("--profile", type=Path, help="file to write what was fitted to, for `headrace simulate`")
    parser.add_argument("--threads", type=int, default=1, help="of the model's operations")
    parser.add_argument("--rounds", type=int, default=3, help="in which each load is served once")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
