"""A goal: what is measured, how good is good enough, and the best that others published.

Goals in times or rates were set on one machine and judge another only roughly; goals as a multiple of a baseline carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ops.bench.report_figures import Figure, Measure


class Section(Enum):
    """Parts of the report, by the results file that each is read from."""

    GATEWAY = "gateway"
    ENGINE = "engine"
    SERVED = "served"
    PREFIX_CACHE = "prefix_cache"
    SPECULATION = "spec"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure to beat.

    Attributes:
        unit: Of the measured figure.
        bound: The figure that is good enough.
        is_cost: Less is better, else more.
        is_multiple: `bound` multiplies the baseline of the same run; of a cost, it says how often ours fits into it.
        reference: The highest figure others published or were measured at, in the words of its source.
        measure: Finds the figure in a run; None while no benchmark takes it.
    """

    section: Section
    what: str
    unit: str
    bound: float
    is_cost: bool = False
    is_multiple: bool = False
    reference: str = ""
    measure: Measure | None = None

    @property
    def text(self) -> str:
        """The goal in words."""
        if self.is_multiple:
            return f"≤ baseline / {self.bound:g}" if self.is_cost else f"≥ {self.bound:g} × baseline"
        return f"{'≤' if self.is_cost else '≥'} {self.bound:,g} {self.unit}".strip()

    def ratio(self, figure: Figure) -> float | None:
        """Return how many times better than the baseline ours is; below 1 it is worse."""
        if not figure.baseline or not figure.value:
            return None
        return figure.baseline / figure.value if self.is_cost else figure.value / figure.baseline

    def reached(self, figure: Figure) -> float | None:
        """Return which fraction of the goal is reached; 1 and above is met."""
        if self.is_multiple:
            ratio = self.ratio(figure)
            return None if ratio is None else ratio / self.bound
        if not self.is_cost:
            return figure.value / self.bound
        return self.bound / figure.value if figure.value > 0 else float("inf")
