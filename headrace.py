"""The command `headrace`, before any of its packages is imported: are they ours?

Their names are short, and other distributions have some of them too (Hugging Face's `kernels`, Canonical's `ops`).
Which one Python finds depends on the order of installation, and a wrong one fails far from its cause.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PACKAGES = ("gateway", "gpu_worker", "kernels", "ops", "shared")


def main() -> None:
    """Run the command line, unless Python would find another distribution's packages."""
    problem = foreign_package(Path(__file__).parent)
    if problem is not None:
        print(f"headrace: {problem}", file=sys.stderr)
        sys.exit(2)
    from ops.cli import main as run

    run()


def foreign_package(root: Path) -> str | None:
    """Return which of our packages is not ours, and what to do; None where all are.

    Args:
        root: The folder that holds ours.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent.parent == root.resolve():
            owner = _distribution(name, root)
            if owner is None:
                continue
        else:
            owner = _distribution(name) or "another distribution"
        remedy = f"install headrace into an environment of its own, or `pip uninstall {name}` and install it again"
        return f"the package `{name}` that Python finds belongs to {owner}, and headrace has one of that name: {remedy}"
    return None


def _distribution(name: str, root: Path | None = None) -> str | None:
    """Return an installed distribution of this name; with `root`, only one that has put the package there."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    package = Path(str(found.locate_file(name)))
    if root is not None and (package.resolve().parent != root.resolve() or not package.is_dir()):
        return None
    return f"the distribution {found.metadata['Name']} {found.version}"
