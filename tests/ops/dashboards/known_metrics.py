"""Whether the metrics and labels that a query names are such as the code has."""

from __future__ import annotations

from gateway.process.metrics_page import EVERY_ROW
from tests.ops.dashboards.promql import named

# What Prometheus adds to each target's samples, and what it makes itself.
TARGET_LABELS = frozenset({"instance", "job"})
LABELS_OF = {"up": TARGET_LABELS}
for _row in EVERY_ROW:
    _labels = frozenset(_row.labels) | TARGET_LABELS
    if _row.kind == "histogram":
        LABELS_OF |= {
            f"{_row.name}_bucket": _labels | {"le"},
            f"{_row.name}_sum": _labels,
            f"{_row.name}_count": _labels,
        }
    else:
        LABELS_OF[_row.name] = _labels


def problems(expression: str, recorded: dict[str, frozenset[str]]) -> list[str]:
    """Return the mistakes of a query; `recorded` are the labels of the metrics of recording rules."""
    labels_of = LABELS_OF | recorded
    found = named(expression)
    known = [labels_of[selector.metric] for selector in found.selectors if selector.metric in labels_of]
    return [
        *(f"no metric {s.metric}" for s in found.selectors if s.metric not in labels_of),
        *(
            f"{selector.metric} has no label {label}"
            for selector in found.selectors
            for label in selector.labels - labels_of.get(selector.metric, selector.labels)
        ),
        *(f"no metric here has a label {label}" for label in found.groups if not any(label in own for own in known)),
    ]
