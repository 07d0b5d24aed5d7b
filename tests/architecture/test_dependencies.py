"""What we depend on: versions with a lower bound, from an index, under licenses that allow what ours allows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from tests.architecture.source import ROOT

RUNTIME_EXTRAS = ("gateway", "worker", "gpu", "embedded")
# Names of licenses, and the words that join them.
ALLOWED = (
    r"apache(-2\.0| software license| license.*2\.0)?|mit( license|-0|-cmu)?|0?bsd( license|-[23]-clause)?|psf-2\.0"
    r"|isc|zlib|mpl-2\.0|cc0-1\.0|bsl-1\.0|hpnd|unlicense|llvm-exception|python software foundation license"
)
# Comes with builds of PyTorch for CUDA, under licenses of its own.
CUDA = re.compile(r"nvidia-|cuda-|cupti|triton-windows")


def requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras or optional for line in optional[extra])]
    return [requirement for line in lines if (requirement := Requirement(line)).name != "headrace"]


def resolved_extras(extras: Iterable[str]) -> set[str]:
    """Return extras and those of ours that they name."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    own = [Requirement(line) for extra in extras for line in optional[extra]]
    named = {extra for requirement in own if requirement.name == "headrace" for extra in requirement.extras}
    return {*extras, *(resolved_extras(named) if named else ())}


def test_every_dependency_has_a_lower_bound_and_comes_from_an_index() -> None:
    for requirement in requirements():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {">=", "==", "~="}, requirement
        assert requirement.url is None, requirement


def test_every_package_that_runs_with_us_has_a_license_that_allows_it() -> None:
    waiting, seen = [requirement.name for requirement in requirements(*RUNTIME_EXTRAS)], set()
    while waiting:
        name = waiting.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform
        if name.lower() in seen or CUDA.match(name.lower()):
            continue
        seen.add(name.lower())
        licenses = licenses_of(found.metadata)
        assert licenses, f"{name} says nothing about its license"
        assert all(re.fullmatch(ALLOWED, text, re.IGNORECASE) for text in licenses), f"{name}: {licenses}"
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    assert {"msgspec", "starlette", "torch", "nats-py"} <= seen


def licenses_of(facts: metadata.PackageMetadata) -> list[str]:
    """Return the names of a package's licenses; of a choice, all."""
    expression = facts.get("License-Expression")
    if expression:
        return parts_of(expression)
    classifiers = [line for line in facts.get_all("Classifier") or [] if line.startswith("License ::")]
    named = [line.split("::")[-1].strip() for line in classifiers]
    return named or parts_of((facts.get("License") or "").split("\n")[0])


def parts_of(expression: str) -> list[str]:
    return [name for part in re.split(r" AND | OR | WITH ", expression) if (name := part.strip(" ()"))]
