"""Devices: dense rates of their makers' data sheets, with sums in 32 bits, and memory as drivers report it.

A data sheet's "80 GB" is neither 80 * 10**9 bytes nor 80 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shared.errors import ConfigError

GB, TB, GIB = 10**9, 10**12, 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        memory_bytes: Of its memory, as `mem_get_info` reports it: a worker divides this number.
        bandwidth: Bytes a second from there.
        flops: Operations a second in bfloat16.
        flops_8bit: The same in FP8; None where products of eight-bit floats are not computed.
        link: Bytes a second to other devices of its host, in one direction.
        source: Where the rates are published.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    flops_8bit: float | None
    link: float
    source: str


def _device(
    name: str, memory_gib: float, tb_per_s: float, tflops: float, tflops_8bit: float | None, link_gb: float, source: str
) -> Device:
    flops_8bit = None if tflops_8bit is None else tflops_8bit * TB
    return Device(name, int(memory_gib * GIB), tb_per_s * TB, tflops * TB, flops_8bit, link_gb * GB, source)


# Memory: "GPU 0 has a total capacity of ... GiB" of PyTorch's out-of-memory errors, the least that public logs and
# issues of 2024 to 2026 have for each, rounded down to a tenth. nvidia-smi shows up to 0.9 GiB more, which CUDA does
# not offer: 81,559 MiB of an H100, 143,771 of an H200, 183,359 of a B200.
_DEVICES = (
    _device("a100", 79.1, 2.039, 312, None, 300, "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM"),
    _device("h100", 79.1, 3.35, 989.5, 1979, 450, "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM"),
    _device("h200", 139.7, 4.8, 989.5, 1979, 450, "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM"),
    _device("b200", 178.3, 8.0, 2250, 4500, 900, "NVIDIA DGX B200 data sheet, an eighth of the system"),
    _device("l40s", 44.3, 0.864, 362.05, 733, 32, "NVIDIA L40S data sheet"),
    _device("rtx4090", 23.6, 1.008, 165.2, 330.3, 32, "NVIDIA Ada GPU Architecture white paper, table of the RTX 4090"),
    _device("rtx5090", 31.3, 1.792, 209.5, 419, 64, "NVIDIA RTX Blackwell GPU Architecture white paper, RTX 5090"),
    _device("mi300x", 191.6, 5.3, 1307.4, 2614.9, 448, "AMD Instinct MI300X data sheet"),
)
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})


def find_device(name: str) -> Device:
    """Return a device by its name.

    Raises:
        ConfigError: It is not known; its figures are not guessed.
    """
    device = DEVICES.get(name.lower().replace("-", "").replace("_", "").replace(" ", "").removesuffix("sxm"))
    if device is None:
        of_worker = name in ("auto", "cpu") or name.startswith("cuda")
        hint = "; it is where a worker runs: is the variable set for workers? Give --device" if of_worker else ""
        raise ConfigError("HEADRACE_DEVICE", f"{name!r} is unsupported; known are {', '.join(DEVICES)}{hint}")
    return device
