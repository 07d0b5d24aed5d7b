"""Checks and timed cases: the contract between the ops' files under `cases/` and the run."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

# Input sets of a case together are larger than this, so that no call finds its inputs in the L2 cache.
ROTATED_BYTES = 256 * 2**20
OURS = "headrace"
# An entry of a launch table: the configuration of a kernel, by its fields.
Entry = Mapping[str, int]
Candidate = Callable[..., object]
# The device part of a whole step, beside `OURS`, which includes the host's part.
OURS_ON_DEVICE = f"{OURS}/device"
# Beside steps that verify drafts.
PLAIN = "no drafts"


class Clock(enum.Enum):
    """How a candidate is timed.

    Members:
        GRAPH: Many calls are captured in a CUDA graph, which is replayed between two events: the device's time alone.
        EVENTS: Calls are made one by one between two events: the host's time shows where the device waits for it.
        OWN: One call runs a whole load, and returns the seconds of its parts by the host's clock.
    """

    GRAPH = enum.auto()
    EVENTS = enum.auto()
    OWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with an oracle.

    Attributes:
        label: Shape and parameters.
        error: Compute both on the device, and return ‖ours - oracle‖ / ‖oracle‖, or the share of wrong entries.
        tolerance: Largest right error. NaN never is.
    """

    label: str
    error: Callable[[], float]
    tolerance: float

    def measure(self) -> float:
        """Return the error, for the same random inputs at each run."""
        torch.manual_seed(zlib.crc32(self.label.encode()))
        return self.error()


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, and the functions that solve it.

    Attributes:
        num_bytes: The fewest that must move through device memory, a call.
        num_flops: Floating-point operations that must be done, a call, on tensor cores.
        num_sets: Input sets; a candidate is called with the number of one.
        candidates: By name. `OURS` is ours; names that begin with it are other configurations of ours. Ours takes an
            `entry`, too, where its kernel has a launch table: it launches by that one instead of the table's.
        unavailable: Baselines that cannot run here, and why.
        clocks: How candidates are timed that do not fit into a graph of many calls.
        num_tokens: Tokens that a call, or a part of a load, makes; 0 where a rate of tokens says nothing.
    """

    num_bytes: int
    num_flops: int
    num_sets: int
    candidates: Mapping[str, Candidate]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """A case that is built when its turn comes, because it fills device memory."""

    label: str
    case: Callable[..., Case]
    arguments: tuple[Any, ...] = ()

    def build(self, device: torch.device) -> Case:
        """Make the inputs."""
        return self.case(device, *self.arguments)


@dataclass(frozen=True, slots=True)
class OpSuite:
    """Everything about one op."""

    name: str
    checks: Callable[[torch.device], list[Check]]
    cases: tuple[CaseSpec, ...]


Shapes = Mapping[str, tuple[Any, ...]]
"""Arguments of the functions of an `Op` after the device, by label."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op at any shape: suites check and time it at theirs, the tuner at those that decide an entry.

    Attributes:
        error: Computes `Check.error` for a device and a shape; if the kernel has a launch table, for an `entry` too.
        case: Returns the timed case for a device and a shape.
        tolerance: Largest accepted error.
    """

    error: Callable[..., float]
    case: Callable[..., Case]
    tolerance: float = 4e-3

    def checks(self, device: torch.device, shapes: Shapes, **entry: Entry) -> list[Check]:
        """Return a check at each shape, of the launches of an `entry` where one is given."""
        return [
            Check(label, partial(self.error, device, *shape, **entry), self.tolerance)
            for label, shape in shapes.items()
        ]

    def cases(self, shapes: Shapes) -> tuple[CaseSpec, ...]:
        """Return a case at each shape."""
        return tuple(CaseSpec(label, self.case, shape) for label, shape in shapes.items())

    def suite(self, name: str, checked: Shapes, timed: Shapes) -> OpSuite:
        """Return the suite that checks and times the op."""
        return OpSuite(name, partial(self.checks, shapes=checked), self.cases(timed))


def sizes(*shapes: tuple[int, ...], prefix: str = "") -> Shapes:
    """Label shapes that are nothing but sizes."""
    return {prefix + "x".join(map(str, shape)): shape for shape in shapes}


def sets_for(bytes_per_set: int) -> int:
    """Return how many input sets defeat the cache."""
    return max(1, min(64, -(-ROTATED_BYTES // bytes_per_set)))


def rotated(
    set_bytes: int, make: Callable[[], Iterable[Any]], candidates: Mapping[str, Candidate]
) -> tuple[int, dict[str, Candidate]]:
    """Return how many input sets defeat the cache, and candidates that call others with one of these sets."""
    num_sets = sets_for(set_bytes)
    sets = [tuple(make()) for _ in range(num_sets)]

    def on_sets(call: Candidate) -> Candidate:
        return lambda index, **entry: call(*sets[index], **entry)

    return num_sets, {name: on_sets(call) for name, call in candidates.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖ in float64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def wrong_share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of entries that differ."""
    return float((actual != expected).double().mean())


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that is compiled at its first call, anew for the shapes of one case."""

    @cache
    def anew() -> Callable[..., object]:
        torch._dynamo.reset()
        return torch.compile(function, dynamic=False)

    return lambda *arguments: anew()(*arguments)
