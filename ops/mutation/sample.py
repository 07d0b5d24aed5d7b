"""The rooms of the project, and the mutants of one that a seed draws."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path

from ops.mutation.mutant import Edit, Mutant, SourceFile
from ops.mutation.semantic import Function, block_edits, fields_of, is_logging, scope_of, semantic_edits, variable_edits

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "gpu_worker", "shared", "kernels", "ops")
# Packages whose folders are rooms; the others are one room each.
_HOUSES = ("gateway", "gpu_worker", "ops")


def rooms() -> dict[str, list[str]]:
    """Return the files of each room, such as `gateway.dispatch`; files directly in a package are a room too."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if path.name not in ("__init__.py", "__main__.py"):
                is_inside = package in _HOUSES and len(parts) > 2
                found[".".join(parts[:2]) if is_inside else package].append("/".join(parts))
    return dict(found)


def draw(paths: list[str], size: int, seed: int, skip: int = 0) -> list[Mutant]:
    """Draw up to `size` different mutants of these files. Operators take turns, since some have many more places.

    The same seed draws the same mutants of the same code in the same order; `skip` leaves out those of an earlier run.
    """
    places: dict[str, list[tuple[SourceFile, Edit]]] = defaultdict(list)
    for path in paths:
        file = SourceFile(ROOT, path)
        for edit in _edits(file):
            places[edit.operator].append((file, edit))
    order = random.Random(seed)
    for name in sorted(places):
        order.shuffle(places[name])
    names = sorted(places)
    order.shuffle(names)
    turns = chain.from_iterable(zip_longest(*(places[name] for name in names)))
    drawn: dict[tuple[str, str, str], Mutant] = {}
    for file, edit in filter(None, turns):
        if len(drawn) == skip + size:
            break
        if (mutant := file.mutant(edit)) is not None:
            drawn.setdefault((mutant.path, mutant.before, mutant.after), mutant)
    return list(drawn.values())[skip:]


def _edits(file: SourceFile) -> Iterator[Edit]:
    for function, outer, attributes in _functions(file.tree, {}, {}):
        for node, is_function in _code(function):
            yield from semantic_edits(file, node)
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    yield from block_edits(file, [each for each in block if not is_logging(each)], is_function)
        yield from variable_edits(file, function, outer, attributes)


def _functions(
    node: ast.AST, outer: Mapping[str, str], attributes: Mapping[str, str]
) -> Iterator[tuple[Function, Mapping[str, str], Mapping[str, str]]]:
    """Yield all functions with the variables around them; bodies of Triton kernels are no Python."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, outer, fields_of(child))
        elif isinstance(child, Function):
            if not any("jit" in ast.unparse(mark) for mark in child.decorator_list):
                yield child, outer, attributes
                yield from _functions(child, {**outer, **scope_of(child)}, attributes)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _functions(child, outer, attributes)


def _code(function: Function) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a function's own code, and whether each is the function.

    Prose is left out: docstrings, log calls, the texts of errors and f-strings; annotations and nested functions too.
    """
    yield function, True
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.JoinedStr) or is_logging(node):
            continue
        yield node, False
        for name, value in ast.iter_fields(node):
            is_type = name == "annotation" or (name == "slice" and isinstance(node, ast.Subscript))
            if is_type or isinstance(node, ast.Raise):
                continue
            waiting += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
