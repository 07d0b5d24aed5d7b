"""A goal: what is measured, how good is good enough, and the best that others published.

Goals in times or rates were set on one machine and judge another only roughly; goals as a multiple of a baseline carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ops.bench.report.figures import Figure, Measure


class Section(Enum):
    """Parts of the report, by the results file that each is read from."""

    GATEWAY = "gateway"
    ENGINE = "engine"
    SERVED = "served"
    PREFIX_CACHE = "prefix_cache"
    SPECULATION = "spec"
    GPU = "gpu"


class Kind(Enum):
    """How a figure is held against its bound: as it is, or as a multiple of the baseline of the same run."""

    AT_LEAST = "≥ {bound} {unit}"
    AT_MOST = "≤ {bound} {unit}"
    TIMES = "≥ {bound} × baseline"
    FRACTION = "≤ baseline / {bound}"


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure to beat.

    Attributes:
        bound: The figure that is good enough; of a multiple, how many times better than the baseline.
        unit: Of the measured figure.
        others: The highest figure others published or were measured at, in the words of its source.
        measure: Finds the figure in a run; None while no benchmark takes it.
    """

    section: Section
    what: str
    kind: Kind
    bound: float
    unit: str = ""
    others: str = ""
    measure: Measure | None = None

    @property
    def text(self) -> str:
        """The goal in words."""
        is_multiple = self.kind in (Kind.TIMES, Kind.FRACTION)
        bound = f"{self.bound:g}" if is_multiple else f"{self.bound:,g}"
        return self.kind.value.format(bound=bound, unit=self.unit).strip()

    def ratio(self, figure: Figure) -> float | None:
        """Return how many times better than the baseline ours is; below 1 it is worse."""
        if not figure.baseline or not figure.value:
            return None
        is_cost = self.kind in (Kind.AT_MOST, Kind.FRACTION)
        return figure.baseline / figure.value if is_cost else figure.value / figure.baseline

    def reached(self, figure: Figure) -> float | None:
        """Return which fraction of the goal is reached; 1 and above is met."""
        if self.kind is Kind.AT_LEAST:
            return figure.value / self.bound
        if self.kind is Kind.AT_MOST:
            return self.bound / figure.value if figure.value > 0 else float("inf")
        ratio = self.ratio(figure)
        return None if ratio is None else ratio / self.bound
