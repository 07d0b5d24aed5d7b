"""The rooms, and the mutants of them that a seed chooses."""

from __future__ import annotations

import random
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MutantSource

ROOT = Path(__file__).resolve().parents[2]

# Which tests look after which room.
ROOMS = {
    "gateway": ["tests/gateway"],
    "gpu_worker/core": ["tests/gpu_worker/core", "tests/gpu_worker/engine/test_engine.py"],
    "gpu_worker/consumer": ["tests/gpu_worker/consumer"],
    "shared": ["tests/shared"],
}
# Rooms of which coverage knows little, since most of their tests run them in processes of their own.
WITH_PROCESSES = ["gateway"]
# Tests that read the code of a room and run none of it.
READING = {room: ["tests/gateway/test_errors.py"] for room in ("gateway", "shared")}
# What a room's code does is noticed by the tests of these rooms too.
ALSO = {"shared": ["gateway", "gpu_worker/consumer"]}


def choose(paths: list[str], size: int, seed: int) -> list[Mutant]:
    """Choose different mutants of these files, each mutant as likely as any other."""
    sources = [MutantSource(ROOT, path) for path in paths]
    places = [(source, index) for source in sources for index in range(len(source))]
    random.Random(seed).shuffle(places)
    chosen: dict[tuple[str, str, str], Mutant] = {}
    for source, index in places:
        if len(chosen) == size:
            break
        mutant = source.mutant(index)
        if mutant.before != mutant.after:
            chosen.setdefault((mutant.path, mutant.before, mutant.after), mutant)
    return list(chosen.values())


def files_of(room: str, wanted: list[str] | None = None) -> list[str]:
    """Return the files of a room, or those of them that are wanted, by name or by folder."""
    paths = sorted((ROOT / room).rglob("*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if path.name not in ("__init__.py", "__main__.py")]
    if wanted is None:
        return files
    return [path for path in files if any(path == each or path.startswith(each.rstrip("/") + "/") for each in wanted)]
