"""How well a simulated fleet predicts a real engine, and a real system: `python -m ops.bench.simulate`.

Fits the times of steps to some loads of the CPU engine: batches of several sizes and lengths, prompts alone, a mixture.
Then it scores what `headrace simulate` says of loads that nothing was fitted to: requests that come at random at
several rates, in bursts, and more than can be served. The engine's clock is its processor time, and fitted and scored
loads take turns by steps, so other work on the machine changes neither. With `--served` the same profile, with the
host's time and a request's way measured over HTTP, is scored on the whole system too, by the wall clock: that needs a
quiet machine. A round takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ops.bench.executed import ExecutedEngine, Execution, take_turns
from ops.bench.record import ResultTable, bench_parser, positive, writable
from ops.bench.systems import address_of, headrace_up, own_settings
from ops.load_generator.answer import Reading, read
from ops.load_generator.connection import Address, Answer
from ops.load_generator.rounds import ask_each
from ops.simulation.fit import MeasuredStep, fit, fit_host, spread_of
from ops.simulation.outcome import percentile
from ops.simulation.profile import Profile, WorkerLimits, write_profile
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.step_time import LinearTimes, StepWork
from ops.simulation.workload import Arrival, Synthetic
from ops.stack.plan import DEMO_MODEL_NAME

WORKER = WorkerLimits(16, 4000, 16, 512, 2048)
VOCABULARY = range(20, 1000)
BATCHES = ((1, 40, 64), (2, 40, 64), (3, 60, 64), (4, 40, 64), (6, 100, 64), (8, 40, 64), (12, 40, 64), (16, 40, 64))
LONG_BATCHES = ((1, 900, 48), (4, 700, 48), (8, 400, 48), (16, 300, 48))
PROMPTS = (20, 60, 120, 250, 480, 900, 1500)
MODEL = Path(__file__).parents[1] / "demo_model/model"
AT_ONCE = "all at once"
_SETTLED = 2
_TIMEOUT_S, _AHEAD_S = 300.0, 0.05
_MEASURES = ("tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
_GOALS = dict(zip((*_MEASURES, "saturation"), (0.05, 0.15, 0.25, 0.15, 0.25, 0.10), strict=True))
_COLUMNS = ("system", "load", "measure", "measured", "predicted", "error", "of rounds")
Figures = dict[str, float]


def fitted_loads(draw: random.Random) -> list[list[Arrival]]:
    """Return what times are fitted to, in random order: all requests of a load come at once."""
    loads = [[Arrival(0.0, prompt, output)] * batch for batch, prompt, output in (*BATCHES, *LONG_BATCHES)]
    loads += [[Arrival(0.0, prompt, 4)] for prompt in PROMPTS]
    loads.append([Arrival(0.0, draw.randint(20, 500), draw.randint(20, 80)) for _ in range(40)])
    draw.shuffle(loads)
    return loads


def saturation_of(profile: Profile) -> float:
    """Return how many requests of 150 tokens and 60 to generate are served each second at most."""
    return predicted(profile, [Arrival(0.0, 150, 60)] * 96)["tokens_per_s"] / 60


def scored_loads(saturation: float, num_requests: int, seed: int) -> dict[str, list[Arrival]]:
    """Return loads that the fit did not use: request rates as shares of the saturation rate, and above it."""
    loads = {
        f"{share:.0%} of saturation": Synthetic(num_requests, share * saturation, 150, 60, spread=0.6)
        for share in (0.3, 0.6, 0.8)
    }
    loads["bursts"] = Synthetic(num_requests, 0.5 * saturation, 250, 40, 0.3, burstiness=1 / 9)
    loads[AT_ONCE] = Synthetic(num_requests, math.inf, 200, 50, spread=0.5)
    # All fit the model's context.
    return {
        name: [
            replace(each, prompt=min(each.prompt, 1500), output=min(each.output, 400)) for each in load.arrivals(seed)
        ]
        for name, load in loads.items()
    }


def fitted(steps: Sequence[MeasuredStep], measured_on: str) -> Profile:
    """Fit a profile to measured steps."""
    times = fit(steps)
    assert isinstance(times.device, LinearTimes)
    return Profile(measured_on, times.device, times.host, 0.0, WORKER, times.cold_s, times.spread)


def predicted(profile: Profile, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Return the simulation's figures."""
    scenario = Scenario(1, profile.worker.config(), profile.times, ttft_slo_s=1e6, latency_s=profile.latency_s)
    outcome = simulate(scenario, iter(arrivals))
    found = (outcome.output_tokens_per_s, *outcome.ttft_s.values(), *outcome.itl_s.values())
    return dict(zip(_MEASURES, found, strict=True))


def measured(answers: Sequence[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """Sum up answers: when each was asked for, and when its tokens came."""
    begin, end = min(sent for sent, _ in answers), max(times[-1] for _, times in answers)
    ttfts = [times[0] - sent for sent, times in answers]
    gaps = [later - earlier for _, times in answers for earlier, later in pairwise(times)]
    found = [sum(len(times) for _, times in answers) / (end - begin)]
    found += [percentile(values, percent) for values in (ttfts, gaps) for percent in (50, 99)]
    return dict(zip(_MEASURES, found, strict=True))


class Scores:
    """Prints predicted beside measured, and keeps the largest error of each measure."""

    def __init__(self) -> None:
        self._table = ResultTable("simulate", _COLUMNS)
        self.errors: dict[str, float] = {}

    def add(self, system: str, load: str, rounds: Sequence[tuple[Figures, Figures]]) -> None:
        """Score the predictions of a load: median of what its rounds measured against that of what they predicted.

        The errors of single rounds, from the least to the greatest, show how certain the error is.
        """
        # Of a load that the system cannot serve, times to first token and between tokens are those of the queue alone.
        for measure in _MEASURES if load != AT_ONCE else _MEASURES[:1]:
            reals, saids = [real[measure] for real, _ in rounds], [said[measure] for _, said in rounds]
            real, said = statistics.median(reals), statistics.median(saids)
            error = _error(said, real)
            each = [_error(said, real) for real, said in zip(reals, saids, strict=True)]
            key, unit = ("saturation" if load == AT_ONCE else measure), (1.0 if measure == _MEASURES[0] else 1e3)
            self.errors[key] = max(self.errors.get(key, 0.0), round(abs(error), 4))
            row = dict(zip(_COLUMNS, (system, load, key), strict=False))
            row |= {"measured": f"{unit * real:.2f}", "predicted": f"{unit * said:.2f}"}
            row |= {"error": f"{error:+.1%}", "of rounds": f"{min(each):+.1%} to {max(each):+.1%}"}
            self._table.add(row)

    def bands(self) -> str:
        """Return the largest error of each measure beside its goal."""
        return "error bands: " + ", ".join(
            f"{name} ± {error:.1%} (goal {_GOALS[name]:.0%}, {'met' if error <= _GOALS[name] else 'missed'})"
            for name, error in self.errors.items()
        )


def _error(said: float, real: float) -> float:
    return said / real - 1 if real else math.inf


def score_engine(options: argparse.Namespace) -> Profile:
    """Fit and score the CPU engine; return the profile with its errors."""
    draw = random.Random(options.seed)
    fitting, scoring = (ExecutedEngine(MODEL, WORKER, seed=place) for place in (0, 1))
    warm = [Execution(load) for load in fitted_loads(draw)]
    for execution in warm:
        for _ in itertools.chain(fitting.serve(execution), scoring.serve(Execution(execution.arrivals))):
            pass
    loads = scored_loads(saturation_of(fitted(_steps(warm), "")), options.requests, options.seed)
    executions: list[Execution] = []
    turns: dict[str, list[tuple[Figures, Sequence[MeasuredStep]]]] = {name: [] for name in loads}
    endless = _fitting(fitting, draw, executions)
    for name, load in [*loads.items()] * options.rounds:
        num_before, found = len(_steps(executions)), Execution(load)
        take_turns(scoring.serve(found), endless)
        seen = measured([(arrival.at, times) for arrival, times in zip(load, found.times, strict=True)])
        turns[name].append((seen, _steps(executions)[num_before:]))
    profile = fitted(_steps(executions), "the CPU engine by its processor time, the demo model")
    scores = Scores()
    for name, load in loads.items():
        # The fitted steps that took turns with a load say how fast the machine was meanwhile.
        around = [(seen, replace(profile, spread=spread_of(steps, profile.times))) for seen, steps in turns[name]]
        scores.add("engine", name, [(seen, predicted(each, load)) for seen, each in around])
    print(scores.bands())
    return replace(profile, errors=scores.errors)


def _steps(executions: Sequence[Execution]) -> list[MeasuredStep]:
    return [step for execution in executions for step in execution.steps]


def _fitting(engine: ExecutedEngine, draw: random.Random, executions: list[Execution]) -> Iterator[None]:
    """Serve loads to fit to without end."""
    while True:
        for load in fitted_loads(draw):
            executions.append(Execution(load))
            yield from engine.serve(executions[-1])


@dataclass(frozen=True, slots=True)
class System:
    """The whole system that is measured."""

    address: Address
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


async def _asked(address: Address, requests: Sequence[tuple[float, bytes]]) -> list[list[Answer]]:
    async with asyncio.timeout(_TIMEOUT_S):
        return await ask_each(address, requests)


def answered(answer: Answer) -> Reading:
    """Read an answer, which must be whole."""
    reading = read(answer)
    if reading.problem is not None:
        raise SystemExit(f"a request was not answered as a whole: {reading.problem}")
    return reading


class Calibration(NamedTuple):
    """Loads of the whole system that say what it adds to the engine's times.

    Attributes:
        gaps: Seconds between two tokens, and the step between them.
        ways: Tokens of a lone prompt, and by how much its time to first token exceeds its steps.
    """

    gaps: list[tuple[StepWork, float]]
    ways: list[tuple[int, float]]

    @classmethod
    def measure(cls, system: System, profile: Profile) -> Calibration:
        """Serve batches that all decode, and prompts alone."""
        gaps: list[tuple[StepWork, float]] = []
        ways = []
        for batch, prompt, output in BATCHES:
            gaps += _gaps(system.serve([Arrival(0.0, prompt, output)] * batch), batch, prompt)
        size = WORKER.max_num_batched_tokens
        for prompt in PROMPTS:
            (answer,) = system.serve([Arrival(0.0, prompt, 2)])
            steps_s = coldness = 0.0
            for start in range(0, prompt, size):
                work = StepWork(0, 0, [(start, min(size, prompt - start))], coldness)
                steps_s += profile.times.seconds(work)[1]
                coldness = work.coldness_after
            ways.append((prompt, answer.ttft_s - steps_s))
        return cls(gaps, ways)


def calibrated(profile: Profile, calibrations: Sequence[Calibration]) -> Profile:
    """Return an engine's profile with the host's times and the latency of the whole system.

    What lone prompts take longer with each of their tokens is the device's: beside other processes it is slower.
    """
    ways = [way for calibration in calibrations for way in calibration.ways]
    pairs = itertools.combinations(ways, 2)
    slope = statistics.median((late - soon) / (long - short) for (short, soon), (long, late) in pairs if long != short)
    token_s = max(0.0, slope)
    latency_s = max(0.0, statistics.median(way - token_s * prompt for prompt, way in ways))
    device = replace(profile.device, token_s=profile.device.token_s + token_s)
    gaps = [gap for calibration in calibrations for gap in calibration.gaps]
    host = fit_host([(work.num_decodes, False, max(0.0, gap_s - device.seconds(*work[:3]))) for work, gap_s in gaps])
    host = replace(host, prompt_s=profile.host.prompt_s)
    return replace(profile, measured_on="headrace up, the demo model", device=device, host=host, latency_s=latency_s)


def score_served(system: System, profile: Profile, options: argparse.Namespace) -> Profile:
    """Score a profile of the engine on the whole system; return it with the host's times there, and its errors.

    The system is calibrated before and after each load; request rates are shares of its own saturation rate.
    """
    calibrations = [Calibration.measure(system, profile)]
    saturation = saturation_of(calibrated(profile, calibrations))
    loads = scored_loads(saturation, options.requests, options.seed)
    turns: dict[str, list[tuple[Figures, Profile]]] = {name: [] for name in loads}
    for name, load in [*loads.items()] * options.rounds:
        seen = measured([(each.sent_at, [at for at, _ in each.texts]) for each in system.serve(load)])
        calibrations.append(Calibration.measure(system, profile))
        turns[name].append((seen, calibrated(profile, calibrations[-2:])))
    scores = Scores()
    for name, load in loads.items():
        scores.add("served", name, [(seen, predicted(each, load)) for seen, each in turns[name]])
    print(scores.bands())
    return replace(calibrated(profile, calibrations), errors=scores.errors)


def _gaps(answers: Sequence[Reading], batch: int, prompt: int) -> list[tuple[StepWork, float]]:
    """Return the gaps between tokens while all streams of a batch decode."""
    begin = max(seen.texts[0][0] for seen in answers)
    end = min(seen.texts[-1][0] for seen in answers)
    found = []
    for seen in answers:
        for place in range(_SETTLED, len(seen.texts)):
            earlier, later = seen.texts[place - 1][0], seen.texts[place][0]
            if begin <= earlier < later <= end:
                found.append((StepWork(batch, batch * (prompt + place)), later - earlier))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, fit and score."""
    parser = bench_parser("simulate", __doc__)
    parser.add_argument("--profile", type=writable, help="file to write the fitted profile, for `headrace simulate`")
    parser.add_argument("--served", action="store_true", help="score the whole system too")
    parser.add_argument("--requests", type=positive, default=200, help="of each load that is scored")
    parser.add_argument("--rounds", type=positive, default=3, help="in which each load is served once")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    options = parser.parse_args(arguments)
    profile = score_engine(options)
    if options.served:
        settings = {"MAX_NUM_SEQS": WORKER.max_num_seqs, "NUM_BLOCKS": WORKER.num_blocks, "CACHE_TTL_S": 0}
        settings |= {"MAX_NUM_BATCHED_TOKENS": WORKER.max_num_batched_tokens, "MAX_MODEL_LEN": WORKER.max_model_len}
        settings |= {"INTERACTIVE_TTFT_SLO_S": 600, "NUM_THREADS": 1}
        with headrace_up([], own_settings(**settings)) as ready:
            system = System(address_of(ready, DEMO_MODEL_NAME))
            system.serve([Arrival(0.0, 100, 30)] * 4)
            profile = score_served(system, profile, options)
    if options.profile is not None:
        write_profile(profile, options.profile)


if __name__ == "__main__":
    main()
