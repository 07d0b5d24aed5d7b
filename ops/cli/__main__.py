"""`python -m ops.cli` is `headrace`."""

from __future__ import annotations

from ops.cli import main

if __name__ == "__main__":
    main()
