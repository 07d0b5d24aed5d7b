"""The CPU engine on a clock of its own processor time, whatever else the machine computes.

Waiting for another process costs nothing on this clock, and idle time is skipped. A slower memory or cache does cost
time; so loads that are compared take turns of `TURN_S` each (`take_turns`), and are slowed alike. A turn has many
steps, since its first ones find the caches full of the other engine's data, and are slower.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.core.step import CompletedStep, SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.simulation.fit import MeasuredStep
from ops.simulation.profile import WorkerLimits
from ops.simulation.step_time import StepWork, step_work
from ops.simulation.workload import Arrival
from shared.messages import Delta, Frame
from shared.sampling import Sampling

TURN_S = 0.25
Times = list[float]


class ProcessorClock:
    """Owns the time: the seconds that this thread has computed within `running` blocks, and those skipped."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._stopped_at: float | None = 0.0

    def time(self) -> float:
        """Return the seconds so far."""
        now = time.thread_time() if self._stopped_at is None else self._stopped_at
        return now + self._offset_s

    def start(self) -> None:
        """Go on."""
        assert self._stopped_at is not None
        self._offset_s += self._stopped_at - time.thread_time()
        self._stopped_at = None

    def stop(self) -> None:
        """Stand still until `start`."""
        self._stopped_at = time.thread_time()

    def skip_to(self, at: float) -> None:
        """Let idle time pass."""
        self._offset_s += max(0.0, at - self.time())


class _MeasuringRunner:
    """Runs each step at once, and notes its work and its seconds."""

    max_steps_in_flight = 1

    def __init__(self, runner: TorchModelRunner, clock: ProcessorClock) -> None:
        self._runner = runner
        self._clock = clock
        self.last: tuple[StepWork, float] | None = None
        self._coldness = 0.0

    def submit(self, plan: StepPlan) -> PendingStep:
        begun = self._clock.time()
        result = self._runner.submit(plan).result()
        work = step_work(plan, self._coldness)
        self.last, self._coldness = (work, self._clock.time() - begun), work.coldness_after
        return CompletedStep(result)


@dataclass(slots=True)
class Execution:
    """Result of a load.

    Attributes:
        arrivals: The load.
        times: When each request's tokens were ready to be sent, seconds after the load's beginning.
        steps: In order.
    """

    arrivals: Sequence[Arrival]
    times: list[Times] = field(init=False)
    steps: list[MeasuredStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.arrivals]


class ExecutedEngine:
    """Owns an engine with the model of a directory, and its clock."""

    def __init__(self, model: Path, limits: WorkerLimits, seed: int = 0) -> None:
        self.clock = ProcessorClock()
        config = RunnerConfig(model, num_threads=1, **{name: getattr(limits, name) for name in limits.__slots__})
        self._runner = _MeasuringRunner(build_runner(config), self.clock)
        self._engine = Engine(Scheduler(limits.config()), self._runner, self.clock.time)
        self._tokenizer = ModelTokenizer(read_model_directory(model))
        self._draw = random.Random(seed)
        self._encode = msgspec.msgpack.Encoder().encode
        self._num_requests = 0
        self._outputs: dict[str, tuple[OutputText, Times]] = {}

    def serve(self, found: Execution) -> Iterator[None]:
        """Serve requests that come at their times, and note it; yield after each step, the clock at rest.

        Raises:
            RuntimeError: A step failed.
        """
        clock, engine = self.clock, self._engine
        begun = clock.time()
        pairs = zip(found.arrivals, found.times, strict=True)
        requests = [self._sequence(arrival, begun, times) for arrival, times in pairs]
        requests.reverse()
        while requests or engine.has_work():
            if not engine.has_work():
                clock.skip_to(requests[-1].arrival)
            clock.start()
            before = clock.time()
            while requests and requests[-1].arrival <= before:
                engine.add(requests.pop())
            events = engine.step()
            self._answer(events, begun)
            clock.stop()
            if engine.last_error is not None:
                raise RuntimeError(f"the engine failed: {engine.last_error}") from engine.last_error
            if self._runner.last is not None:
                work, device_s = self._runner.last
                found.steps.append(MeasuredStep(work, device_s, clock.time() - before - device_s))
                self._runner.last = None
            yield

    def _sequence(self, arrival: Arrival, begun: float, times: Times) -> EngineSequence:
        self._num_requests += 1
        prompt = self._draw.choices(range(20, 1000), k=arrival.prompt)
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=arrival.output)
        sequence = EngineSequence(f"r{self._num_requests}", prompt, len(prompt), sampling, max_tokens=arrival.output)
        sequence.arrival = begun + arrival.at
        self._outputs[sequence.id] = self._tokenizer.output_text(prompt, sampling), times
        return sequence

    def _answer(self, events: Sequence[SequenceEvent], begun: float) -> None:
        """Handle the tokens of a step as a worker does: detokenize them, and make a frame for the gateway."""
        deltas = []
        for event in events:
            text = "".join([self._outputs[event.sequence.id][0].feed(token) for token in event.token_ids])
            deltas.append(Delta(event.sequence.id, 0, event.num_tokens_before, event.token_ids, text))
        self._encode(Frame("worker", 0, deltas))
        now = self.clock.time() - begun
        for event in events:
            self._outputs[event.sequence.id][1].extend([now] * len(event.token_ids))
            if event.finish is not None:
                del self._outputs[event.sequence.id]


def take_turns(scored: Iterator[None], endless: Iterator[None]) -> None:
    """Advance two engines in turns of `TURN_S` of processor time, until the first has ended; begin with the other."""
    for engine in itertools.cycle((endless, scored)):
        end = time.thread_time() + TURN_S
        while time.thread_time() < end:
            try:
                next(engine)
            except StopIteration:
                return
