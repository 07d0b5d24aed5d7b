"""State-space duality (Mamba-2): a matrix a head that fades and is added to, by steps that each token chooses."""

from kernels.ssd.dispatch import ssd
from kernels.ssd.reference import SsdSizes, SsdWeights

__all__ = ["SsdSizes", "SsdWeights", "ssd"]
