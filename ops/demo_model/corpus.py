"""Modules of the running CPython's standard library that the demo model never saw in training.

Every machine that can run the demo model has the text already. The list is explicit, so that perplexities of different
years can be compared. As a command (`python -m ops.demo_model.corpus`) it lists them; with `--text` it prints their
concatenated source.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

HELD_OUT_MODULES = (
    *("bisect.py", "cmd.py", "colorsys.py", "fnmatch.py", "fractions.py", "graphlib.py", "heapq.py", "html/parser.py"),
    *("json/encoder.py", "netrc.py", "queue.py", "shlex.py", "statistics.py", "textwrap.py", "urllib/robotparser.py"),
    "wsgiref/headers.py",
)


def standard_library() -> Path:
    """Return the folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_documents(library: Path | None = None) -> list[str]:
    """Return the source of each held-out module in `library`, by default this interpreter's, in order."""
    root = library or standard_library()
    paths = [root / name for name in HELD_OUT_MODULES]
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def main() -> None:
    """List the held-out modules, or print their source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", action="store_true", help="print the source, not the names")
    arguments = parser.parse_args()
    lines = held_out_documents() if arguments.text else [f"{name}\n" for name in HELD_OUT_MODULES]
    sys.stdout.write("".join(lines))


if __name__ == "__main__":
    main()
