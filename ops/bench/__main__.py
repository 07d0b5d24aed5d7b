"""`make bench`: the whole system with a simulated engine under load, as `ops.bench.gateway` measures it by default."""

from __future__ import annotations

import sys

from ops.bench.gateway import main

if __name__ == "__main__":
    sys.exit(main())
