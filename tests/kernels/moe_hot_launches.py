"""Those launches of `moe_launches` that every run of the tests compiles."""

from __future__ import annotations

from collections.abc import Callable

from kernels.gpu_config import Gpu
from tests.kernels import moe_launches

_NAMES = ("qwen_1", "gpt_oss_512")


def launches(gpu: Gpu) -> dict[str, Callable[[], object]]:
    named = moe_launches.launches(gpu)
    return {name: named[name] for name in _NAMES}
