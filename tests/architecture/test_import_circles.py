"""No modules import each other in a circle, neither at start, nor in functions, nor for type checking."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from tests.architecture.source import PACKAGES

grimp = pytest.importorskip("grimp", reason="comes with import-linter, which is not installed")


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle in the order in which they import one another, none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["gpu_worker.engine.engine"] >= {"gpu_worker.core.scheduler"}
    assert circle_of(imports) == []


def test_circle_is_found_and_told_in_order_of_imports() -> None:
    imports = {"a": {"b", "e"}, "b": {"c"}, "c": {"a"}, "e": set()}
    circle = circle_of(imports)
    assert set(circle) == {"a", "b", "c"}
    assert all(later in imports[earlier] for earlier, later in pairwise(circle))
