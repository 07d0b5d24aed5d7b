"""Loads a model with `transformers`, in a process of its own; prints what it took, and when it was ready.

Run by `ops.bench.startup`. Arguments: model directory, device.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch


def main(directory: str, device: str) -> None:
    """Load in bfloat16, straight to the device where `transformers` can."""
    from transformers import AutoModelForCausalLM

    has_accelerate = find_spec("accelerate") is not None
    started = time.perf_counter()
    options = {"device_map": device} if has_accelerate else {}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    if not has_accelerate:
        model = model.to(device)
    # Mapped weights have not been read before they are used.
    total = sum(float(parameter.flatten()[::1024].float().sum()) for parameter in model.parameters())
    if device == "cuda":
        torch.cuda.synchronize()
    assert total == total
    print(json.dumps({"load_s": round(time.perf_counter() - started, 3), "ready_s": time.time()}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
