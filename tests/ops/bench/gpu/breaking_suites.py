"""Suites on the CPU some of which crash or poison their process, as suites on a GPU may."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

from ops.bench.gpu import timer as device_timer
from ops.bench.gpu.case import OURS, Case, CaseSpec, Check, Clock, OpSuite
from ops.bench.gpu.timer import Timer, Timing

device_timer._COPY_BYTES, device_timer._MATRIX_SIZE = 1000, 8


class OneCallTimer:
    """Calls once."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        call(num_sets - 1)
        return Timing(1e-6, 0.0, is_graphed=True)


def device() -> torch.device:
    return torch.device("cpu")


def timer() -> Timer:
    return OneCallTimer()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def poison() -> None:
    """Break every later tensor of this process, as a sticky CUDA error does."""

    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.zeros = refuse  # type: ignore[assignment]
    refuse()


def work() -> None:
    torch.zeros(1)


def make_suite(name: str, call: Callable[[], None] = work, error: float = 0.0) -> OpSuite:
    def cases(device: torch.device) -> Case:
        return Case(1, 0, 1, {OURS: lambda _: call()})

    def check() -> float:
        work()
        return error

    labels = ("first", "second")
    return OpSuite(
        name, lambda device: [Check("check", check, 0.1)], tuple(CaseSpec(f"{name} {label}", cases) for label in labels)
    )


def all_suites() -> tuple[OpSuite, ...]:
    return (
        make_suite("crashing", crash),
        make_suite("poisoned", poison),
        make_suite("wrong", error=1.0),
        make_suite("right"),
    )
